"""What the report shows of a run, before it is words, pictures or HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blendkv.eval.items import Result, Run
from blendkv.eval.report.text import clean, measured

Row = Mapping[str, Any]
"""A row of ``summary.json``."""

STAGES = ("score", "load", "rotate", "recompute", "question")
DEVIATIONS = ("k", "v", "attention")
_EXACT = ("full", "prefix")
_BUDGET = re.compile(r"@(?:[^@+-]|(?<=e)[+-](?=\d))*")


@dataclass(frozen=True)
class Report:
    """A run and its summary, with the rows that the report speaks of again and again."""

    run: Run
    rows: Sequence[Row]

    @property
    def meta(self) -> Mapping[str, Any]:
        """``run.json``."""
        return self.run.meta

    @property
    def correct(self) -> bool:
        """Whether the oracles held; without that, no speed-up is shown."""
        return self.meta.get("correct") is True

    def row(self, mode: str | None) -> Row | None:
        """The row of a mode."""
        return next((r for r in self.rows if r["mode"] == mode), None)

    @property
    def full(self) -> Row | None:
        """Full prefill, which all else is held against."""
        return self.row("full")

    @property
    def approximate(self) -> list[Row]:
        """Rows of the modes that do not compute what full prefill computes."""
        return [r for r in self.rows if name(r) not in _EXACT]

    @property
    def blends(self) -> list[Row]:
        """Rows of the modes that recompute something: neither exact, nor reuse as it is."""
        return [r for r in self.approximate if name(r) != "reuse"]

    @property
    def closest(self) -> Row | None:
        """The blend whose KL from full prefill is lowest."""
        with_kl = [r for r in self.blends if measured(r, "kl") is not None]
        return min(with_kl, key=lambda r: measured(r, "kl") or 0.0, default=None)

    def results(self, mode: str) -> list[Result]:
        """Results of a mode."""
        return [r for r in self.run.results if r.mode == mode]

    def worst(self, count: int = 10) -> list[Result]:
        """Results of the closest blend with the highest KL, worst first; empty where no KL was measured."""
        best = self.closest
        found = [r for r in self.results(best["mode"]) if _number(r.kl)] if best else []
        return sorted(found, key=lambda r: r.kl or 0.0, reverse=True)[:count]


def _number(value: float | None) -> bool:
    return value is not None and np.isfinite(value)


def name(row: Row) -> str:
    """What a mode does: ``full``, ``prefix``, ``reuse``, ``blend``, or the name of a published baseline."""
    return re.split("[:@]", row["mode"])[0]


def short(mode: str) -> str:
    """A mode's name for narrow places: the selector speaks for the blend."""
    return clean(mode.removeprefix("blend:"))


def series(row: Row) -> str:
    """What stays the same when only the budget changes: selector and shift, or the baseline's name."""
    return short(_BUDGET.sub("", row["mode"]))


def published(row: Row) -> bool:
    """Whether the row is CacheBlend, as published or by its rule at an honest budget."""
    return name(row) == "cacheblend" or row.get("selector") == "kv_deviation"


def by_series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of the same series together, in the order of the run."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(series(row), []).append(row)
    return found


def speedup(row: Row) -> tuple[float, float, float] | None:
    """Speed-up over full prefill and its 95 % interval; the interval is empty where only medians are known."""
    estimate = measured(row, "speedup", "estimate")
    if estimate is None:
        estimate = measured(row, "speedup_p50")
    if estimate is None:
        return None
    low, high = measured(row, "speedup", "low"), measured(row, "speedup", "high")
    return estimate, estimate if low is None else low, estimate if high is None else high


def deviations(report: Report) -> dict[str, dict[str, np.ndarray]]:
    """Mean relative deviation by layer, ``[layers]``, per kind (``k``, ``v``, ``attention``) and mode."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for kind in DEVIATIONS:
        for row in report.rows:
            curves = [r.deviation[kind] for r in report.results(row["mode"]) if r.deviation and r.deviation.get(kind)]
            if curves:
                found.setdefault(kind, {})[row["mode"]] = np.asarray(curves, dtype=np.float64).mean(0)
    return found


def predictions(report: Report) -> dict[str, list[tuple[float, float]]]:
    """Per mode: seconds that the planner expected the blend to take, and that it took (all stages but the question)."""
    found: dict[str, list[tuple[float, float]]] = {}
    for result in report.run.results:
        expected = measured(result.predicted_s, "total")
        taken = sum(v for stage, v in result.stages_s.items() if stage != "question")
        if expected and taken:
            found.setdefault(result.mode, []).append((expected, taken))
    return found
