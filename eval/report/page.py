"""From a run to ``report.html``: one file that needs nothing else, neither network nor script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from blendkv.errors import InputError, MissingDependencyError
from blendkv.eval.items import Run
from blendkv.eval.report import table, words
from blendkv.eval.report.data import Report
from blendkv.eval.report.passages import worst_items
from blendkv.eval.report.plots import plots
from blendkv.eval.report.svg import require_matplotlib
from blendkv.eval.report.text import clean

_TEMPLATES = Path(__file__).parent


def write_report(run: Run, summary: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the report of a run.

    The page carries its style and pictures in itself, holds no script, and forbids any request; all text of the
    data and of the model is escaped.

    Parameters
    ----------
    run
        A run, read from its folder.
    summary
        The rows of its ``summary.json``.
    path
        Where the HTML goes; it is replaced whole, or not at all.

    Raises
    ------
    InputError
        If the summary has no row.
    MissingDependencyError
        If matplotlib or jinja2 is not installed.
    """
    page = render(run, summary)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)


def render(run: Run, summary: Sequence[Mapping[str, Any]]) -> str:
    """The report as text; see `write_report`."""
    if not summary:
        raise InputError(f"{run.folder} has no results to report; finish the run first: blendkv eval run")
    require_matplotlib()
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise MissingDependencyError(
            "the report is laid out by jinja2, which is not installed; run: pip install 'blendkv[eval]'"
        ) from error
    report = Report(run, summary)
    loader = FileSystemLoader(_TEMPLATES)
    engine = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    engine.filters["breaks"] = _breaks
    return engine.get_template("page.html.j2").render(
        style=Markup((_TEMPLATES / "page.css").read_text(encoding="utf-8")),
        title=clean(f"{run.meta.get('model')} on {run.meta.get('data')}"),
        subtitle=words.subtitle(report),
        facts=words.facts(report),
        correct=report.correct,
        check=words.check(report),
        verdict=words.verdict(report),
        modes=table.modes(report),
        plots=plots(report),
        grids=table.figures(report),
        pairs=table.pairs(report),
        load=table.load_rows(report),
        closest=clean(report.closest["mode"]) if report.closest else None,
        worst=worst_items(report),
    )


def _breaks(mode: str) -> Markup:
    """A mode's name that a narrow table may break at its signs."""
    return Markup("<wbr>").join(re.split(r"(?<=[:_])|(?=[@+])", mode))
