"""The quality gate's search: the cheapest blend of a model that is close enough to full prefill, with the evidence.

A first part of the items screens the candidates: what is clearly above the target is dropped. The others run on the
remaining items, which nothing was chosen by, and are judged there (`blendkv.eval.judging`).
"""

from __future__ import annotations

import datetime
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blendkv import __version__
from blendkv.blend import BlendSummary, parse_mode
from blendkv.blend.gate import Evidence, Target, Verdict
from blendkv.errors import InputError
from blendkv.eval.environment import environment
from blendkv.eval.items import EvalItem
from blendkv.eval.judging import Samples, give_up, judge, ladders, level_of, summary
from blendkv.eval.metrics import f1, first_line, rouge_l
from blendkv.eval.modes import EvalMode, parse_eval_mode
from blendkv.eval.run import RED
from blendkv.eval.subject import Built, Subject, Truth, build
from blendkv.store.codecs import RAW

GRID = (
    *(f"blend:strided@{b:g}" for b in (0.02, 0.03, 0.05, 0.10, 0.15, 0.20)),
    *(f"blend:head_query@{b:g}" for b in (0.03, 0.05, 0.10, 0.15, 0.20, 0.30)),
    *(f"blend:head_query@{b:g}-shift" for b in (0.10, 0.15, 0.20, 0.30)),
    *(f"blend:head_query@{b:g}+js" for b in (0.05, 0.10, 0.20)),
    "blend:chunk_head@0.15",
    "blend:kv_deviation@0.15",
)
"""The candidates unless others are named."""
CHUNKS = 6
LEAST_ITEMS = 8
_SCREENING = 4
"""One item in so many screens."""
_LOOK = 8
"""After so many items each, what has no hope is given up."""
_ROUNDING = 1e-4
"""KL in nats that rounding may make in float32, with room to spare; `RED` is for half precision."""
Progress = Callable[[str, int, int], None]


def calibrate(
    subject: Subject,
    items: Sequence[EvalItem],
    *,
    target: Target | None = None,
    candidates: Sequence[str] | None = None,
    chunks: int | None = CHUNKS,
    recipe: str = "system",
    seed: int = 0,
    data: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda stage, done, total: None,
) -> Verdict:
    """Find the cheapest candidate that meets the target, on disjoint items for choosing and for judging.

    Parameters
    ----------
    subject
        The model in an engine.
    items
        At least `LEAST_ITEMS`; shuffled by ``seed``.
    target
        See `blendkv.blend.gate.Target`.
    candidates
        Mode specs, `GRID` by default.
    chunks
        Most passages per prompt.
    recipe
        By which ``subject`` computes chunks, to be written down.
    seed
        Of the shuffle and of the bootstrap.
    data
        What the items are, to be written down.
    tell, progress
        Hear how it goes.

    Raises
    ------
    InputError
        If there are too few items, no candidate, or one that is no blend.
    """
    target = target or Target()
    modes = _candidates(GRID if candidates is None else candidates)
    if len(items) < LEAST_ITEMS:
        raise InputError(f"{len(items)} items are too few to judge a model by; give {LEAST_ITEMS} or more")
    order = random.Random(seed).sample(list(items), len(items))
    first, rest = order[: len(order) // _SCREENING], order[len(order) // _SCREENING :]
    screened = [Samples(m) for m in modes]
    if (red := _screen(subject, first, screened, chunks, recipe, progress)) is not None:
        rows, full, measured, level = list[Evidence](), None, list[Samples](), target.confidence
    else:
        for sample in screened:
            sample.give_up_if_above(target, target.confidence, seed)
        measured = [Samples(s.mode) for s in screened if s.running]
        tell(f"{len(measured)} of {len(modes)} modes are left after {len(first)} items")
        groups = ladders(measured)
        level = level_of(target, len(groups))
        rows, full = _confirm(subject, rest, groups, chunks, target, level, seed, progress)
        rows += [s.row("screen", level, seed, None) for s in screened if s.hopeless]
    left_out = {s.mode.spec: s.broken for s in (*screened, *measured) if s.broken is not None}
    passed = sorted((r for r in rows if r.passed), key=lambda r: 1.0 if r.cost is None else r.cost)
    cheapest = passed[0] if passed else None
    told = {
        **(data or {}), "items": len(items), "seed": seed, "chunks": chunks, "codec": subject.codec,
        "f1_full": full, "confidence_per_rule": level, "left_out": left_out,
    }  # fmt: skip
    return Verdict(
        bool(passed), red or summary(rows, cheapest, target, level, left_out), cheapest.mode if cheapest else None,
        tuple(r.mode for r in passed), target, tuple(rows), told, subject.model, subject.dtype, recipe,
        subject.engine_name, environment(), __version__,
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def _candidates(specs: Sequence[str]) -> list[EvalMode]:
    modes = {m.spec: m for m in map(parse_eval_mode, specs)}
    for mode in modes.values():
        if mode.mode is None or mode.exact:
            raise InputError(f"{mode.spec} cannot be calibrated; give reuse or blend:SELECTOR@BUDGET")
    if not modes:
        raise InputError("no mode is given; name at least one, for instance blend:head_query@0.05")
    return list(modes.values())


def _screen(
    subject: Subject,
    items: Sequence[EvalItem],
    samples: Sequence[Samples],
    chunks: int | None,
    recipe: str,
    progress: Progress,
) -> str | None:
    """KL and cost of every candidate on the first items; a reason if blending is broken as such."""
    for number, item in enumerate(items):
        built, truth = _prepare(subject, item, chunks)
        if number == 0 and (fault := _oracles(subject, item, built, truth, recipe)) is not None:
            return f"blending this model is broken: {fault}"
        for sample in samples:
            if sample.running:
                _compare(sample, subject, built, truth)
        progress("screening", number + 1, len(items))
    return None


def _oracles(subject: Subject, item: EvalItem, built: Built, truth: Truth, recipe: str) -> str | None:
    """What must be full prefill but for rounding, and is not: every token recomputed; a chunk where it was computed."""
    rounding = _ROUNDING if subject.dtype == "float32" else RED
    if not (kl := subject.budget_one(built, truth)) <= rounding:
        return f"with every token recomputed, KL to full prefill is {kl:.3g}"
    if recipe == "system" and subject.codec == RAW:
        alone, whole = _prepare(subject, item, 1)
        if not (kl := subject.compare(alone, EvalMode("reuse", parse_mode("reuse")), whole).kl) <= rounding:
            return f"one chunk behind the prefix that it was computed behind has KL {kl:.3g} to full prefill"
    return None


def _prepare(subject: Subject, item: EvalItem, chunks: int | None) -> tuple[Built, Truth]:
    built = build(subject, item, chunks)
    subject.prepare(built)
    return built, subject.truth(built)


def _confirm(
    subject: Subject,
    items: Sequence[EvalItem],
    groups: Sequence[Sequence[Samples]],
    chunks: int | None,
    target: Target,
    level: float,
    seed: int,
    progress: Progress,
) -> tuple[list[Evidence], float | None]:
    """Measure the ladders on the other items; their rows, judged, and full prefill's mean F1."""
    full: list[float] = []
    times: list[float] = []
    exact = EvalMode("full", parse_mode("full"))
    for number, item in enumerate(items):
        running = [s for group in groups for s in group if s.running]
        if not running:
            break
        built, truth = _prepare(subject, item, chunks)
        full.append(_quality(built, truth.text))
        times.append(subject.ask(built, exact, 1).ttft_s)
        for sample in running:
            _compare(sample, subject, built, truth)
            if sample.running:
                _ask(sample, subject, built, truth)
        if (number + 1) % _LOOK == 0:
            for group in groups:
                give_up(group, target, level, seed)
        progress("confirming", number + 1, len(items))
    full_s = statistics.median(times) if times else None
    rows = [row for group in groups for row in judge(group, target, level, seed, full_s)]
    return rows, statistics.fmean(full) if full else None


def _compare(sample: Samples, subject: Subject, built: Built, truth: Truth) -> None:
    """Measure KL and cost on one item."""
    try:
        found = subject.compare(built, sample.mode, truth)
    except InputError as error:
        sample.broken = str(error)
        return
    if not math.isfinite(found.kl):
        sample.broken = f"its KL on {built.record.item} is {found.kl}"
        return
    sample.kl.append(found.kl)
    if found.report is not None:
        sample.budgets.append(found.report.budget_spent)
        sample.costs.append(_cost(found.report))


def _ask(sample: Samples, subject: Subject, built: Built, truth: Truth) -> None:
    """Measure the answer and its time on one item."""
    asked = subject.ask(built, sample.mode, built.max_new_tokens)
    if asked.fallback is not None:
        sample.broken = f"{built.record.item} was prefilled in full: {asked.fallback}"
        return
    sample.ttft.append(asked.ttft_s)
    sample.f1.append(_quality(built, asked.text) - _quality(built, truth.text))


def _cost(report: BlendSummary) -> float:
    """Rows that a blend ran through the model over those of a full prefill: unlike time, the same on every run."""
    rows = report.fresh_tokens + report.scored_rows + report.budget_spent * report.reusable_tokens
    return rows / report.total_tokens


def _quality(built: Built, text: str) -> float:
    record = built.record
    return rouge_l(text, record.answers) if record.task == "summary" else f1(first_line(text), record.answers)
