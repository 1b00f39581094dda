"""The tables of the report: the modes, what was compared in pairs, and what was measured under load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blendkv.eval.report.data import STAGES, Report, Row, deviations, name, short, speedup
from blendkv.eval.report.text import (
    DASH,
    clean,
    figure,
    fixed,
    measured,
    milliseconds,
    percent,
    size,
    whole,
)


@dataclass(frozen=True)
class Cell:
    """What is shown, the figure as the summary has it (None for no figure), and lines below in small type."""

    text: str
    value: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Column:
    """A column of the table of modes. ``optional`` ones are left out where no mode has a figure, and named below."""

    key: str
    head: str
    cell: Callable[[Row], Cell]
    optional: bool = True


@dataclass(frozen=True)
class Table:
    """Heads, a list of cells per mode, and the columns that nothing was measured for."""

    columns: Sequence[Column]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    absent: Sequence[str]


def _plain(key: str, show: Callable[[float | None], str]) -> Callable[[Row], Cell]:
    return lambda row: Cell(show(measured(row, key)), measured(row, key))


def _with_error(key: str, show: Callable[[float | None], str] = fixed) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        value, error = measured(row, key), measured(row, f"{key}_se")
        return Cell(show(value), value, "" if value is None or error is None else f"±\u00a0{show(error)}")

    return cell


def _budget(row: Row) -> Cell:
    nominal = measured(row, "nominal")
    note = "" if nominal is None else f"named {percent(nominal, 0) if nominal <= 1 else f'{nominal:g} tokens'}"
    asked = measured(row, "budget_asked")
    if asked is not None:
        note = f"asked {percent(asked)}" + (f"\n{note}" if note else "")
    return Cell(percent(measured(row, "budget_spent")), measured(row, "budget_spent"), note)


def _ttft(row: Row) -> Cell:
    low, high = measured(row, "ttft_ms", "p20"), measured(row, "ttft_ms", "p80")
    note = "" if low is None or high is None else f"{milliseconds(low)} – {milliseconds(high)}"
    return Cell(milliseconds(measured(row, "ttft_ms", "p50")), measured(row, "ttft_ms", "p50"), note)


def _speedup(row: Row) -> Cell:
    found = speedup(row)
    if found is None:
        return Cell(DASH)
    estimate, low, high = found
    return Cell(f"{estimate:.2f}x", estimate, f"{low:.2f} – {high:.2f}" if low < high else "")


def _fallbacks(row: Row) -> Cell:
    found = row.get("fallbacks") or {}
    return Cell(str(sum(found.values())) if found else DASH, float(sum(found.values())) if found else None)


SPEEDUP = Column("speedup", "Speed\u2011up", _speedup, optional=False)
COLUMNS = (
    Column("kl", "KL from full prefill", _with_error("kl", figure), optional=False),
    SPEEDUP,
    Column("f1", "F1", _with_error("f1"), optional=False),
    Column("budget_spent", "Budget spent", _budget),
    Column("ttft", "Time to first token", _ttft, optional=False),
    Column("top1", "Same top token", _plain("top1", percent), optional=False),
    Column("em", "Exact match", _with_error("em")),
    Column("rouge_l", "Rouge-L", _with_error("rouge_l")),
    Column("f1_full", "F1 against full prefill’s answer", _with_error("f1_full")),
    Column("kl_first", "KL, first token", _with_error("kl_first", figure)),
    Column("kl_gold", "KL on the gold answer", _with_error("kl_gold", figure)),
    Column("bytes_loaded", "KV loaded, all items", _plain("bytes_loaded", size)),
    Column("prediction_error", "Planner’s median error", _plain("prediction_error", percent)),
    Column("fallbacks", "Fallbacks", _fallbacks),
    Column("n", "Items", _plain("n", whole), optional=False),
)


def modes(report: Report) -> Table:
    """The table of modes; without a pass of the correctness check it has no speed-up."""
    columns, absent = [], []
    for column in COLUMNS:
        if column is SPEEDUP and not report.correct:
            continue
        if column.optional and all(column.cell(row).value is None for row in report.rows):
            if column.key not in ("fallbacks", "prediction_error"):
                absent.append(column.head)
            continue
        columns.append(column)
    return Table(columns, [(clean(r["mode"]), [c.cell(r) for c in columns]) for r in report.rows], absent)


@dataclass(frozen=True)
class Grid:
    """Modes by something, as figures."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]


@dataclass(frozen=True)
class Pair:
    """A mode against another one: words per figure."""

    mode: str
    other: str
    cells: Sequence[Cell]


_PAIRED = {"kl": "KL", "f1": "F1", "rouge_l": "Rouge-L", "ttft": "Time to first token"}


@dataclass(frozen=True)
class Pairs:
    """Comparisons under a caption, with the figures that any of them has."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Pair]


def pairs(report: Report) -> list[Pairs]:
    """Comparisons with full prefill, and of the other modes with each other, each pair once.

    The KL of exact modes is rounding only, so KL is not compared with theirs.
    """
    with_full: list[Pair] = []
    others: list[Pair] = []
    seen: set[frozenset[str]] = set()
    for row in report.rows:
        for other, found in (row.get("against") or {}).items():
            theirs = report.row(other)
            if theirs is None or name(row) == "full" or frozenset((row["mode"], other)) in seen:
                continue
            is_exact = "prefix" in (name(row), name(theirs)) or name(theirs) == "full"
            shown = [k for k in _PAIRED if not (k == "kl" and is_exact) and not (k == "ttft" and not report.correct)]
            cells = [_compared(found.get(key)) if key in shown else Cell(DASH) for key in _PAIRED]
            if all(cell.text == DASH for cell in cells):
                continue
            seen.add(frozenset((row["mode"], other)))
            (with_full if name(theirs) == "full" else others).append(Pair(short(row["mode"]), short(other), cells))
    return [
        _shown(caption, rows)
        for caption, rows in (("Each mode against full prefill", with_full), ("Modes against each other", others))
        if rows
    ]


def _shown(caption: str, rows: Sequence[Pair]) -> Pairs:
    """Without the columns that have nothing."""
    kept = [at for at in range(len(_PAIRED)) if any(pair.cells[at].text != DASH for pair in rows)]
    heads = list(_PAIRED.values())
    return Pairs(
        caption, [heads[at] for at in kept], [Pair(p.mode, p.other, [p.cells[at] for at in kept]) for p in rows]
    )


def _compared(found: Mapping[str, Any] | None) -> Cell:
    if not found:
        return Cell(DASH)
    return Cell(str(found.get("words") or DASH), measured(found, "estimate"))


def figures(report: Report) -> list[Grid]:
    """What the pictures show, as figures: stage times, and deviations as means over the layers."""
    found = []
    timed = [r for r in report.rows if any(measured(r, "stages_ms", s) is not None for s in STAGES)]
    if timed and report.correct:
        stages = [(short(r["mode"]), [_cell(measured(r, "stages_ms", s), fixed) for s in STAGES]) for r in timed]
        found.append(Grid("Stage times, median milliseconds", STAGES, stages))
    curves = deviations(report)
    means = {kind: {mode: float(np.nanmean(c)) for mode, c in found.items()} for kind, found in curves.items()}
    deviating = [r["mode"] for r in report.rows if any(r["mode"] in m for m in means.values())]
    if deviating:
        cells = [(short(m), [_cell(means[k].get(m), figure) for k in means]) for m in deviating]
        found.append(Grid("Relative deviation from full prefill, mean over layers", tuple(means), cells))
    return found


def _cell(value: float | None, show: Callable[[float | None], str]) -> Cell:
    return Cell(show(value), value)


def load_rows(report: Report) -> list[tuple[str, dict[str, str]]]:
    """What was measured under Poisson load, by mode."""
    found = []
    for row in report.rows:
        load = row.get("load")
        if load:
            found.append(
                (
                    short(row["mode"]),
                    {
                        "Requests per second offered": figure(measured(load, "rate")),
                        "Requests": whole(measured(load, "requests")),
                        "Requests per second served": figure(measured(load, "throughput")),
                        "Time to first token, median": milliseconds(measured(load, "ttft_ms", "p50")),
                        "p80": milliseconds(measured(load, "ttft_ms", "p80")),
                        "Errors": whole(measured(load, "errors")),
                    },
                )
            )
    return found
