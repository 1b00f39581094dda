"""From what was measured of a rule at several budgets to a verdict: ladders, bounds, and the words for people.

Each rule is a ladder of budgets, judged from the largest down until one fails. A fixed order of tests needs no
correction for their number, because a false pass needs the first unfit one to pass; several ladders share the allowed
error by Bonferroni (fixed sequence testing; Angelopoulos et al. 2021, Learn Then Test, arXiv 2110.01052).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from blendkv.blend.gate import Evidence, Target
from blendkv.eval.modes import EvalMode
from blendkv.eval.stats import lower_bound, upper_bound


@dataclass
class Samples:
    """What was measured of a candidate, item by item.

    Attributes
    ----------
    mode
        The candidate.
    kl, f1, ttft
        KL to full prefill, F1 minus full prefill's, seconds to the first token.
    budgets, costs
        Spent budget, and rows run over those of a full prefill.
    broken
        Why it cannot be used at all.
    hopeless
        Why it is not measured any further.
    """

    mode: EvalMode
    kl: list[float] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    budgets: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    broken: str | None = None
    hopeless: str = ""

    @property
    def running(self) -> bool:
        """Whether it is still in the race."""
        return self.broken is None and not self.hopeless

    def give_up_if_above(self, target: Target, level: float, seed: int) -> None:
        """Mark it when its KL is clearly above the target. Giving up early lets nothing pass that would not have."""
        if self.running and (least := lower_bound(self.kl, level, seed)) > target.kl:
            self.hopeless = f"its KL is at least {least:.3g}"

    def row(self, stage: Literal["screen", "confirm"], level: float, seed: int, full_s: float | None) -> Evidence:
        """The figures with bounds at ``level``; ``full_s`` is full prefill's time to the first token."""
        upper, lower = upper_bound(self.kl, level, seed), lower_bound(self.f1, level, seed)
        return Evidence(
            self.mode.spec, stage, len(self.kl), statistics.fmean(self.kl), upper if math.isfinite(upper) else None,
            _mean(self.f1), lower if math.isfinite(lower) else None, _mean(self.budgets), _mean(self.costs),
            statistics.median(self.ttft) / full_s if full_s and self.ttft else None, False, self.hopeless,
        )  # fmt: skip


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def ladders(samples: Sequence[Samples]) -> list[list[Samples]]:
    """The candidates by rule (selector, shift and probes), each from the largest budget down."""
    found: dict[object, list[Samples]] = {}
    for sample in samples:
        mode = sample.mode.mode
        assert mode is not None
        rule = mode.name if mode.blend is None else replace(mode.blend, budget=None, shift=mode.blend.shift_kind)
        found.setdefault(rule, []).append(sample)
    return [sorted(ladder, key=_asked, reverse=True) for ladder in found.values()]


def _asked(sample: Samples) -> float:
    settings = None if sample.mode.mode is None else sample.mode.mode.settings
    return 0.0 if settings is None else settings.asked


def level_of(target: Target, count: int) -> float:
    """The confidence of each of ``count`` ladders' bounds that gives the target's for all of them together."""
    return 1 - (1 - target.confidence) / max(1, count)


def give_up(ladder: Sequence[Samples], target: Target, level: float, seed: int) -> None:
    """Mark what is clearly above the target, and all below it on its ladder: they could not pass behind it."""
    failed: str | None = None
    for sample in (s for s in ladder if s.broken is None):
        sample.give_up_if_above(target, level, seed)
        if failed is not None and sample.running:
            sample.hopeless = behind(failed)
        if sample.hopeless and failed is None:
            failed = sample.mode.spec


def behind(mode: str) -> str:
    """Why what stands further down a ladder is not taken."""
    return f"it comes behind {mode}, which failed"


def judge(ladder: Sequence[Samples], target: Target, level: float, seed: int, full_s: float | None) -> list[Evidence]:
    """The rows of a ladder; the first that fails fails all below it."""
    judged: list[Evidence] = []
    failed: str | None = None
    for sample in (s for s in ladder if s.broken is None):
        row = sample.row("confirm", level, seed, full_s)
        note = row.note or _fault(row, target) or ("" if failed is None else behind(failed))
        if note and failed is None:
            failed = row.mode
        judged.append(replace(row, passed=not note, note=note))
    return judged


def _fault(row: Evidence, target: Target) -> str:
    """What keeps a row from meeting the target; empty if nothing does."""
    faults = []
    if row.kl_upper is None or row.kl_upper > target.kl:
        faults.append(f"its KL may be as high as {_figure(row.kl_upper)}")
    if row.f1_lower is None or row.f1_lower < -target.f1:
        faults.append(f"its F1 may be lower by {_figure(row.f1_lower and -row.f1_lower)}")
    return " and ".join(faults)


def _figure(value: float | None) -> str:
    return "anything" if value is None else f"{value:.3g}"


def summary(
    rows: Sequence[Evidence], cheapest: Evidence | None, target: Target, level: float, left_out: Mapping[str, str]
) -> str:
    """The verdict in one line: what passed, or whether quality or the size of the sample stands in the way."""
    if cheapest is not None:
        lower = cheapest.f1_lower or 0.0
        return (
            f"{cheapest.mode}: KL {cheapest.kl:.3g} (at most {_figure(cheapest.kl_upper)}, allowed {target.kl:g}), "
            f"F1 {cheapest.f1_difference:+.3f} (at least {lower:+.3f}, allowed -{target.f1:g}), with {level:.4g} "
            f"confidence, {cheapest.n} items"
        )
    if not rows:
        mode, why = next(iter(left_out.items()))
        return f"no mode could be measured; {mode}: {why}"
    near = [r for r in rows if r.stage == "confirm" and r.kl <= target.kl and (r.f1_difference or 0.0) >= -target.f1]
    best = min(near or rows, key=lambda r: r.kl)
    f1 = "" if best.f1_difference is None else f", F1 {best.f1_difference:+.3f} (allowed -{target.f1:g})"
    measured = f"{best.mode} has KL {best.kl:.3g} (allowed {target.kl:g}){f1} in {best.n} items"
    if not near:
        return f"quality: the closest mode, {measured}"
    return (
        f"not shown: {measured}, which meets the target, but {best.note} at {level:.4g} confidence: give more items, "
        "or a wider target"
    )
