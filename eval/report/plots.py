"""The report's pictures. Each is drawn from the summary, or says in words why it is not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from blendkv.eval.report.data import (
    DEVIATIONS,
    STAGES,
    Report,
    Row,
    by_series,
    deviations,
    name,
    predictions,
    published,
    short,
    speedup,
)
from blendkv.eval.report.svg import INK, LINE, PALETTE, SOFT, inline_svg, page_style
from blendkv.eval.report.text import figure, listed, measured, milliseconds, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.6
"""Inches: at this width the text can be read on a phone's screen."""

_MARKERS = "osD^vPXph<"
_NORMAL = 1.96
_WIDE = 10.0
"""From this ratio of largest to smallest, an axis is logarithmic."""

_NO_SPEED = "Not drawn: the correctness check did not pass, so nothing is said about speed."


@dataclass(frozen=True)
class Plot:
    """A picture with its caption; without a picture the caption says why."""

    title: str
    caption: str
    svg: Markup | None = None


def plots(report: Report) -> list[Plot]:
    """All pictures of the report, in order."""
    drawn: list[Callable[[Report], Plot]] = [
        lambda r: pareto(r, "kl"),
        lambda r: pareto(r, "f1"),
        budgets,
        stages,
        layers,
        planner,
    ]
    with page_style():
        return [draw(report) for draw in drawn]


def _new(height: float, rows: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    made = Figure(figsize=(WIDTH, height), layout="constrained")
    return made, list(made.subplots(rows, 1, squeeze=False, **options)[:, 0])


def _styles(report: Report) -> dict[str, tuple[str, str]]:
    """Colour and marker per series, the same in every picture; what is no blend has the text's colour, or grey."""
    found = {"full": (INK, "*"), "prefix": (SOFT, "|"), "reuse": (SOFT, "x")}
    names = [s for s in by_series(report.rows) if s not in found]
    return found | {s: (PALETTE[i % len(PALETTE)], _MARKERS[i % len(_MARKERS)]) for i, s in enumerate(names)}


def _label(key: str, rows: Sequence[Row]) -> str:
    return f"{key} (CacheBlend)" if any(published(r) for r in rows) and not key.startswith("cacheblend") else key


def _log_if_wide(axis: Any, values: Sequence[float]) -> bool:
    """A logarithmic axis where the figures ask for it, with plain numbers on it."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    positive = [v for v in values if v > 0]
    if not positive or max(positive) < _WIDE * min(positive):
        return False
    scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    scale("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(positive) < 300 * min(positive) else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    return True


def pareto(report: Report, quality: str) -> Plot:
    """Quality against speed-up, with 95 % intervals; the dashed line joins what nothing else beats in both."""
    what = {"kl": "KL from full prefill (nats)", "f1": "F1 against the gold answers"}[quality]
    title = {"kl": "KL against speed-up", "f1": "F1 against speed-up"}[quality]
    if not report.correct:
        return Plot(title, _NO_SPEED)
    points = [(r, s, q) for r in report.rows if (s := speedup(r)) and (q := measured(r, quality)) is not None]
    if not points:
        return Plot(title, f"Not drawn: no mode has both a speed-up and a {'KL' if quality == 'kl' else 'F1'}.")
    made, (axes,) = _new(3.7)
    inexact = [q for r, _, q in points if name(r) not in ("full", "prefix")]
    log = quality == "kl" and _log_if_wide(axes.yaxis, inexact)
    floor = min(q for q in inexact if q > 0) / 3 if log else -np.inf
    _log_if_wide(axes.xaxis, [s[0] for _, s, _ in points])
    styles = _styles(report)
    axes.axvline(1.0, color=LINE, linewidth=1.2, zorder=0.5)
    for key, rows in by_series([r for r, _, _ in points]).items():
        _points(axes, [p for p in points if p[0] in rows], quality, floor, (_label(key, rows), *styles[key]))
    best = _front(points, -1 if quality == "kl" else 1)
    axes.plot([s[0] for _, s, _ in best], [max(q, floor) for *_, q in best], "--", color=INK, alpha=0.45, linewidth=1)
    if not log:
        axes.margins(y=0.12)
    axes.grid(True)
    axes.set_xlabel("speed-up of the time to the first token (full prefill = 1)")
    axes.set_ylabel(what)
    made.legend(loc="outside lower center", ncols=2)
    good = "lower right" if quality == "kl" else "upper right"
    says = f"{good} is better; bars are 95 % intervals; the dashed line joins the modes that no other beats in both."
    if log and any(q < floor for *_, q in points):
        says += " Modes whose KL is zero but for rounding stand on the lower edge."
    says += " A ring marks CacheBlend's rule." if any(published(r) for r, *_ in points) else ""
    label = f"{title}: " + "; ".join(f"{short(r['mode'])} {figure(q)} at {s[0]:.2f}x" for r, s, q in points)
    return Plot(title, says[0].upper() + says[1:], inline_svg(made, f"pareto-{quality}", label))


def _points(axes: Axes, points: list[Any], quality: str, floor: float, style: tuple[str, str, str]) -> None:
    """One series: points with their intervals, joined in the order of their speed-up, with budgets beside them."""
    label, colour, marker = style
    points = sorted(points, key=lambda p: p[1][0])
    x = np.array([s for _, s, _ in points])
    y = np.array([max(q, floor) for *_, q in points])
    half = np.array([_NORMAL * (measured(r, f"{quality}_se") or 0.0) for r, *_ in points])
    down = np.minimum(half, y - floor) if np.isfinite(floor) else half
    sides = np.maximum(0.0, [x[:, 0] - x[:, 1], x[:, 2] - x[:, 0]])
    star = marker == "*"
    axes.errorbar(
        x[:, 0], y, yerr=np.stack((down, half)), xerr=sides, fmt=marker, color=colour, label=label, capsize=2,
        linewidth=1, markersize=13 if star else 7, linestyle="-" if len(points) > 1 else "none", zorder=3,
    )  # fmt: skip
    for (row, *_), left, bottom in zip(points, x[:, 0], y, strict=True):
        if published(row):
            axes.plot(left, bottom, "o", markersize=15, markerfacecolor="none", markeredgecolor=INK, zorder=4)
        text = "full prefill" if star else _budget(row) if len(points) > 1 else "CacheBlend" if published(row) else ""
        axes.annotate(text, (left, bottom), (9, 6), textcoords="offset points", fontsize=8)


def _budget(row: Row) -> str:
    asked = measured(row, "nominal")
    if asked is None:
        asked = measured(row, "budget_asked")
    return "" if asked is None else percent(asked, 0) if asked <= 1 else f"{asked:g}"


def _front(points: list[Any], sign: int) -> list[Any]:
    """Points that no other beats in both speed-up and quality, fastest first."""
    kept: list[Any] = []
    for point in sorted(points, key=lambda p: (-p[1][0], -sign * p[2])):
        if not kept or sign * point[2] > sign * kept[-1][2]:
            kept.append(point)
    return kept


def budgets(report: Report) -> Plot:
    """KL against the honest budget, a line per selector."""
    title = "KL against budget"
    rows = [
        r for r in report.blends if measured(r, "kl") is not None and measured(r, "budget_spent") is not None
    ]  # fmt: skip
    if not rows:
        return Plot(title, "Not drawn: no blend has both a KL and a budget.")
    made, (axes,) = _new(3.7)
    styles = _styles(report)
    reuse = measured(report.row("reuse"), "kl")
    kl = [k for r in rows if (k := measured(r, "kl")) is not None]
    log = _log_if_wide(axes.yaxis, kl if reuse is None else [*kl, reuse])
    _log_if_wide(axes.xaxis, [measured(r, "budget_spent") or 0.0 for r in rows])
    for key, group in by_series(rows).items():
        group = sorted(group, key=lambda r: measured(r, "budget_spent") or 0.0)
        x = [100 * (measured(r, "budget_spent") or 0.0) for r in group]
        y = np.array([measured(r, "kl") or 0.0 for r in group])
        half = np.array([_NORMAL * (measured(r, "kl_se") or 0.0) for r in group])
        down = np.minimum(half, 0.9 * y) if log else half
        axes.errorbar(
            x, y, yerr=np.stack((down, half)), fmt=styles[key][1], color=styles[key][0], label=_label(key, group),
            capsize=2, linewidth=1.4, markersize=6, linestyle="-",
        )  # fmt: skip
    if reuse is not None:
        axes.axhline(reuse, linestyle=":", color=INK, linewidth=1.2, label="reuse (nothing recomputed)")
    axes.grid(True)
    axes.set_xlabel("budget spent (% of layers x reusable tokens computed afresh)")
    axes.set_ylabel("KL from full prefill (nats)")
    made.legend(loc="outside lower center", ncols=2)
    label = f"{title}: " + "; ".join(
        f"{short(r['mode'])} {figure(measured(r, 'kl'))} at {percent(measured(r, 'budget_spent'))}" for r in rows
    )
    return Plot(
        title,
        "Lower is better; bars are 95 % intervals. The budget counts every token computed afresh in every layer.",
        inline_svg(made, "budgets", label),
    )


def stages(report: Report) -> Plot:
    """Where the time to the first token goes, a bar per mode."""
    title = "Where the time to the first token goes"
    if not report.correct:
        return Plot(title, _NO_SPEED)
    rows = [r for r in report.rows if any(measured(r, "stages_ms", s) for s in STAGES)]
    if not rows:
        return Plot(title, "Not drawn: no stage times were measured.")
    made, (axes,) = _new(1.5 + 0.32 * len(rows))
    left = np.zeros(len(rows))
    for stage, colour in zip(STAGES, (PALETTE[i] for i in (3, 5, 4, 1, 0)), strict=True):
        wide = np.array([measured(r, "stages_ms", stage) or 0.0 for r in rows])
        if wide.any():
            axes.barh(range(len(rows)), wide, left=left, color=colour, label=stage, height=0.62)
        left += wide
    for at, (row, end) in enumerate(zip(rows, left, strict=True)):
        total = measured(row, "ttft_ms", "p50")
        axes.annotate(milliseconds(end if total is None else total), (end, at), (4, -3), textcoords="offset points",
                      fontsize=8)  # fmt: skip
    axes.set_yticks(range(len(rows)), [short(r["mode"]) for r in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, left.max() * 1.2)
    axes.grid(True, axis="x")
    axes.set_xlabel("milliseconds, median over items")
    made.legend(loc="outside lower center", ncols=3)
    label = f"{title}: " + "; ".join(
        f"{short(r['mode'])} " + ", ".join(f"{s} {figure(measured(r, 'stages_ms', s))} ms" for s in STAGES)
        for r in rows
    )
    whole = [
        f"{short(r['mode'])} {milliseconds(total)}"
        for r in report.rows
        if r not in rows and (total := measured(r, "ttft_ms", "p50")) is not None
    ]
    says = (
        "Bars are median stage times, “question” is all that is not another stage; the figure beside a bar is the "
        "median time from the call to the first token." + (f" Without stages: {listed(whole)}." if whole else "")
    )
    return Plot(title, says, inline_svg(made, "stages", label))


def layers(report: Report) -> Plot:
    """How far K, V and the question's attention are from full prefill's, by mode and layer."""
    from matplotlib.ticker import MaxNLocator

    title = "Deviation from full prefill by layer"
    found = deviations(report)
    if not found:
        return Plot(title, "Not drawn: deviations by layer were not measured.")
    kinds = [k for k in DEVIATIONS if k in found]
    most = max(len(found[k]) for k in kinds)
    made, panels = _new(0.9 + len(kinds) * (0.45 + 0.19 * most), len(kinds), sharex=True)
    top = max(float(np.nanmax([np.nanmax(c) for c in found[k].values()])) for k in kinds)
    for kind, axes in zip(kinds, panels, strict=True):
        grid = np.stack(list(found[kind].values()))
        shown = axes.imshow(grid, aspect="auto", cmap="viridis", vmin=0.0, vmax=top or 1.0, interpolation="none")
        axes.set_title({"k": "K of the chunks", "v": "V of the chunks"}.get(kind, "attention of the question"))
        axes.set_yticks(range(len(grid)), [short(m) for m in found[kind]], fontsize=8)
        axes.spines[:].set_visible(False)
    panels[-1].set_xlabel("layer")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    made.colorbar(shown, ax=panels, shrink=0.7, aspect=30, pad=0.02)
    return Plot(
        title,
        "Relative deviation, mean over items; dark is close to full prefill.",
        inline_svg(made, "layers", f"{title}: a heat map of K, V and attention. The figures below have its means."),
    )


def planner(report: Report) -> Plot:
    """Time of the blend as the loading planner expected it, against what was measured."""
    title = "The loading planner's predictions"
    if not report.correct:
        return Plot(title, _NO_SPEED)
    found = predictions(report)
    if not found:
        return Plot(title, "Not drawn: the loading planner predicted nothing in this run.")
    made, (axes,) = _new(3.7)
    styles = _styles(report)
    every = [v * 1e3 for pairs in found.values() for pair in pairs for v in pair]
    ends = [min(every) / 1.15, max(every) * 1.15]
    _log_if_wide(axes.xaxis, every)
    _log_if_wide(axes.yaxis, every)
    axes.plot(ends, ends, "--", color=INK, alpha=0.45, linewidth=1)
    for key, rows in by_series(report.rows).items():
        points = [pair for row in rows for pair in found.get(row["mode"], ())]
        if points:
            x, y = 1e3 * np.array(points).T
            axes.plot(x, y, styles[key][1], color=styles[key][0], label=key, markersize=4.5, alpha=0.8)
    axes.grid(True)
    axes.set_xlabel("predicted (ms)")
    axes.set_ylabel("measured (ms)")
    made.legend(loc="outside lower center", ncols=2)
    errors = {r["mode"]: e for r in report.rows if (e := measured(r, "prediction_error")) is not None}
    words = listed([f"{percent(e)} of {short(m)}" for m, e in errors.items()])
    return Plot(
        title,
        "A point per item: the time of a blend, without the question. On the dashed line both agree."
        + (f" Median relative error: {words}." if errors else ""),
        inline_svg(made, "planner", f"{title}. Median relative error: {words or 'not worked out'}"),
    )
