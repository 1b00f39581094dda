"""``report.html`` of `bench market`: what each policy saves by cache size, by class, and waits under overload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from blendkv.errors import MissingDependencyError
from blendkv.eval.bench.market import MarketResult, means
from blendkv.eval.bench.rows import Row
from blendkv.eval.report.plots import WIDTH, Plot
from blendkv.eval.report.svg import INK, PALETTE, SOFT, inline_svg, page_style, require_matplotlib
from blendkv.eval.report.text import DASH, clean, figure, fixed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "osD^vPX"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>BlendKV bench market</title>
<style>
{{ style }}
</style>
</head>
<body>
<header>
<p class="kicker">BlendKV bench</p>
<h1>The cache as a market</h1>
<p class="note">{{ subtitle }}</p>
</header>
<main>
<p id="check" class="{{ 'failed' if problems else 'passed' }}"{% if problems %} role="alert"{% endif %}>{{ check }}</p>
{% for grid in grids %}
<section>
<h2>{{ grid.title }}</h2>
<div class="scroll" tabindex="0" role="region" aria-label="{{ grid.title }}">
<table>
<thead><tr><th scope="col">Policy</th>
{% for head in grid.heads %}<th scope="col">{{ head }}</th>{% endfor %}</tr></thead>
<tbody>
{% for name, cells in grid.rows %}
<tr><th scope="row">{{ name }}</th>{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
<p class="note">{{ grid.note }}</p>
</section>
{% endfor %}
<section id="plots">
<h2>Pictures</h2>
<div class="plots">
{% for plot in plots %}
<figure>
<h3>{{ plot.title }}</h3>
{{ plot.svg }}
<figcaption>{{ plot.caption }}</figcaption>
</figure>
{% endfor %}
</div>
</section>
<section id="facts">
<h2>What was run</h2>
<dl>
{% for key, value in facts %}
<div><dt>{{ key }}</dt><dd>{{ value }}</dd></div>
{% endfor %}
</dl>
</section>
</main>
</body>
</html>
"""


def write_market_report(result: MarketResult, door: Sequence[Row], environment: Mapping[str, Any], path: Path) -> None:
    """Write the page; it needs nothing else, neither network nor script.

    Parameters
    ----------
    result, door
        Of `run_market` and of `door_rows`.
    environment
        What it ran on.
    path
        Where the HTML goes; it is replaced whole, or not at all.

    Raises
    ------
    MissingDependencyError
        If matplotlib or jinja2 is not installed.
    """
    require_matplotlib()
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise MissingDependencyError(
            "the report is laid out by jinja2, which is not installed; run: pip install 'blendkv[eval]'"
        ) from error
    engine = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    style = (files("blendkv.eval.report") / "page.css").read_text(encoding="utf-8")
    policies = list(dict.fromkeys(row["policy"] for row in result.rows))
    seeds = sorted({row["seed"] for row in result.rows if row["seed"] is not None})
    page = engine.from_string(_PAGE).render(
        style=Markup(style),
        subtitle=f"{len(result.traces)} traces, {len(policies)} policies, seeds {', '.join(map(str, seeds)) or DASH}",
        problems=result.problems,
        check=_check(result),
        grids=[*_grids(result), *([_door_grid(door)] if door else [])],
        plots=_plots(result, door, policies),
        facts=[
            *((name, clean(about)) for name, about in result.traces.items()),
            ("costs", clean(str(result.costs))),
            *((key, clean(str(value))) for key, value in environment.items() if value is not None),
        ],
    )
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)


def _check(result: MarketResult) -> str:
    if result.problems:
        return "Checks: FAILED, so no ratio is given. " + "; ".join(clean(p) for p in result.problems)
    return "Checks: passed (tokens and bytes add up; no policy beats Belady on blocks of one size and cost)."


def _grids(result: MarketResult) -> list[dict[str, Any]]:
    """A table per trace: seconds saved, and the ratio to the best classic policy, by cache size."""
    saved, ratio = means(result.rows, "seconds_saved"), means(result.rows, "ratio_to_best_classic")
    belady, p99 = means(result.rows, "ratio_to_belady"), means(result.rows, "p99_ttft_ms")
    grids = []
    for trace, names, sizes in _traces(result.rows):
        heads = [f"{what} at {size:.0%}" for size in sizes for what in ("s saved", "to classic", "to Belady", "p99 ms")]
        rows = [
            (name, [cell for size in sizes for cell in (
                figure(saved.get((trace, name, size)), 4), fixed(ratio.get((trace, name, size))),
                fixed(belady.get((trace, name, size))), figure(p99.get((trace, name, size))),
            )])
            for name in names
        ]  # fmt: skip
        some = [r for r in result.rows if r["trace"] == trace]
        total, most = (float(np.mean([r[c] for r in some])) for c in ("seconds_total", "seconds_ceiling"))
        note = (
            f"Means over seeds. All prefill takes {total:,.0f} s; a cache that forgets nothing saves {most:,.0f} s. "
            "“To classic” is the ratio to the best of LRU, LFU, GDSF, LHD and ARC on the same seed and size; p99 is "
            "the time to the first token in an open queue, first come first served."
        )
        grids.append({"title": clean(trace), "heads": heads, "rows": rows, "note": note})
    return grids


def _door_grid(door: Sequence[Row]) -> dict[str, Any]:
    classes = list(door[0]["by_class"])
    heads = [
        *(f"{name} p99 s" for name in classes),
        "all p50 s",
        "per s",
        "tokens/s",
        "longest wait s",
        "starved",
        "refused",
    ]
    rows = [
        (
            f"{row['policy']}, {row['loop']} loop, {_with(row['admission'])}, seed {row['seed']}",
            [
                *(_seconds(row["by_class"].get(name, {}).get("p99_ttft_ms")) for name in classes),
                _seconds(row["p50_ttft_ms"]), fixed(row["throughput"], 2),
                fixed(row["tokens_per_s"], 0), fixed(row["longest_wait_s"], 1),
                row["starved"], row["refused"],
            ],
        )
        for row in door
    ]  # fmt: skip
    note = "One engine, 1.5 times the requests that it can bear; interactive is agent and chat turns together."
    return {"title": "Overload, with and without admission control", "heads": heads, "rows": rows, "note": note}


def _with(admission: str) -> str:
    return "with" if admission == "door" else "without"


def _seconds(milliseconds: float | None) -> str:
    return DASH if milliseconds is None else f"{milliseconds / 1e3:.2f}"


def _traces(rows: Sequence[Row]) -> list[tuple[str, list[str], list[float]]]:
    """Each trace with its policies and cache sizes."""
    found = []
    for trace in dict.fromkeys(row["trace"] for row in rows):
        some = [row for row in rows if row["trace"] == trace]
        names = list(dict.fromkeys(row["policy"] for row in some))
        found.append((trace, names, sorted({row["cache_fraction"] for row in some})))
    return found


def _plots(result: MarketResult, door: Sequence[Row], policies: Sequence[str]) -> list[Plot]:
    styles = {name: _style(at, name) for at, name in enumerate(policies)}
    with page_style():
        drawn = [_curves(result, *found, styles) for found in _traces(result.rows)]
        drawn += [_classes(result.rows, trace) for trace, *_ in _traces(result.rows)]
        return drawn + ([_door(door)] if door else [])


def _style(at: int, name: str) -> dict[str, Any]:
    """Colour, marker and line of a policy, the same in every picture; ours is thick, the offline bounds are grey."""
    if name.startswith("belady"):
        return {"color": SOFT, "marker": "x" if name == "belady" else "+", "linestyle": ":"}
    if name == "market":
        return {"color": INK, "marker": "*", "linewidth": 2.4, "markersize": 9}
    line = "-" if at < len(PALETTE) else "--"
    return {"color": PALETTE[at % len(PALETTE)], "marker": _MARKERS[at % len(_MARKERS)], "linestyle": line}


def _new(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    made = Figure(figsize=(WIDTH, height), layout="constrained")
    return made, made.subplots()


def _curves(
    result: MarketResult, trace: str, names: Sequence[str], sizes: Sequence[float], styles: Mapping[str, Any]
) -> Plot:
    saved = means(result.rows, "seconds_saved")
    made, axes = _new(4.2)
    for name in names:
        values = [saved[trace, name, size] for size in sizes]
        axes.plot([100 * size for size in sizes], values, label=name, **({"markersize": 5} | styles[name]))
    most = float(np.mean([row["seconds_ceiling"] for row in result.rows if row["trace"] == trace]))
    axes.axhline(most, color=INK, linestyle=":", linewidth=1.0, label="nothing forgotten")
    axes.set_xlabel("cache size (% of the distinct KV)")
    axes.set_ylabel("seconds of prefill saved")
    axes.grid(True)
    made.legend(loc="outside lower center", ncols=3)
    title = f"Seconds saved: {clean(trace)}"
    words = "; ".join(f"{name} " + ", ".join(figure(saved[trace, name, size]) for size in sizes) for name in names)
    svg = inline_svg(made, f"saved-{_plain(trace)}", f"{title}: {words}")
    return Plot(title, "Higher is better; means over seeds.", svg)


def _classes(rows: Sequence[Row], trace: str) -> Plot:
    """Share of each class's prefill that is saved, at the smallest cache, a group of bars per class."""
    size = min(row["cache_fraction"] for row in rows if row["trace"] == trace)
    some = [row for row in rows if row["trace"] == trace and row["cache_fraction"] == size]
    names = list(dict.fromkeys(row["policy"] for row in some))
    classes = sorted({name for row in some for name in row["by_class"]})
    made, axes = _new(1.4 + 0.17 * len(names) * len(classes))
    height = 0.8 / len(classes)
    for at, workload in enumerate(classes):
        shares = [_share([r["by_class"].get(workload) for r in some if r["policy"] == name]) for name in names]
        place = [n + (at - (len(classes) - 1) / 2) * height for n in range(len(names))]
        axes.barh(place, shares, height, color=PALETTE[at % len(PALETTE)], label=workload)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("% of the class's prefill seconds saved")
    axes.grid(True, axis="x")
    made.legend(loc="outside lower center", ncols=4)
    title = f"By class at {size:.0%}: {clean(trace)}"
    return Plot(title, "As the requests are tagged.", inline_svg(made, f"classes-{_plain(trace)}", title))


def _share(figures: Sequence[Mapping[str, Any] | None]) -> float:
    saved = sum(f["seconds_saved"] for f in figures if f)
    total = sum(f["seconds_total"] for f in figures if f)
    return 100.0 * saved / total if total else 0.0


def _door(door: Sequence[Row]) -> Plot:
    """p99 by class without and with admission control, one bar each, means over seeds."""
    classes = list(door[0]["by_class"])
    kinds = list(dict.fromkeys((row["policy"], row["loop"], row["admission"]) for row in door))
    made, axes = _new(1.4 + 0.22 * len(classes) * len(kinds))
    height = 0.8 / len(kinds)
    for at, kind in enumerate(kinds):
        some = [row for row in door if (row["policy"], row["loop"], row["admission"]) == kind]
        values = [np.mean([row["by_class"][name]["p99_ttft_ms"] / 1e3 for row in some]) for name in classes]
        place = [n + (at - (len(kinds) - 1) / 2) * height for n in range(len(classes))]
        label = f"{kind[0]}, {kind[1]} loop, {_with(kind[2])}"
        axes.barh(place, values, height, color=PALETTE[at % len(PALETTE)], label=label)
    axes.set_yticks(range(len(classes)), classes)
    axes.invert_yaxis()
    axes.set_xlabel("p99 time to the first token (s)")
    axes.grid(True, axis="x")
    made.legend(loc="outside lower center", ncols=2)
    title = "Overload: time to the first token by class"
    return Plot(title, "Lower is better; means over seeds.", inline_svg(made, "door", title))


def _plain(name: str) -> str:
    """Fit for an id inside the page."""
    return "".join(c if c.isalnum() else "-" for c in name)
