"""Two runs side by side: the same modes on the same items, before and after a change, or on two engines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from blendkv.errors import InputError
from blendkv.eval.items import ItemRecord, Result, Run
from blendkv.eval.stats import paired

_EXACT = ("full", "prefix")


def _ttft(result: Result) -> float | None:
    return statistics.median(result.ttft_s) if result.ttft_s else None


_FIGURES: dict[str, tuple[Literal["ratio", "difference"], Callable[[Result], float | None]]] = {
    "kl": ("ratio", lambda r: r.kl),
    "f1": ("difference", lambda r: r.f1),
    "rouge_l": ("difference", lambda r: r.rouge_l),
    "ttft": ("ratio", _ttft),
}


def compare(a: Run, b: Run) -> list[dict[str, Any]]:
    """Compare ``a`` with ``b``, mode by mode, on the items that both have.

    Items are the same when their id, question and passages are.

    Returns
    -------
    list
        A row per mode that both have: ``mode``, ``n`` (items), and under ``kl``, ``f1``, ``rouge_l`` and ``ttft``
        the means ``a`` and ``b`` (TTFT in seconds) with the fields of `blendkv.eval.stats.Paired`: KL and TTFT as the
        geometric mean of the ratios a / b, F1 and Rouge-L as the mean difference a - b. None where one of the runs
        has no figure, for the KL of exact modes (rounding only), and for TTFT if either run's correctness is red. An
        end of an interval that is not finite is None.

    Raises
    ------
    InputError
        If the runs have no item, or no mode, in common.
    """
    shared = _shared_items(a, b)
    modes = [mode for mode in a.modes if mode in b.modes]
    if not modes:
        raise InputError(
            f"{a.folder} and {b.folder} have no mode in common ({', '.join(a.modes)}; {', '.join(b.modes)}); run both "
            "with the same --modes"
        )
    timed = a.meta.get("correct") is True and b.meta.get("correct") is True
    seed = int(a.meta.get("seed") or 0)
    rows = []
    for mode in modes:
        mine, theirs = ({r.item: r for r in run.results if r.mode == mode and r.item in shared} for run in (a, b))
        pairs = [(mine[item], theirs[item]) for item in mine if item in theirs]
        row: dict[str, Any] = {"mode": mode, "n": len(pairs)}
        for key in _FIGURES:
            left_out = (key == "kl" and mode in _EXACT) or (key == "ttft" and not timed)
            row[key] = None if left_out else _compare(key, pairs, seed)
        rows.append(row)
    return rows


def _shared_items(a: Run, b: Run) -> set[str]:
    named = [item for item in a.items if item in b.items]
    shared = {item for item in named if _text(a.items[item]) == _text(b.items[item])}
    if not shared:
        why = (
            f"{len(named)} items have the same id but another question or other passages"
            if named
            else "no id is in both"
        )
        raise InputError(
            f"{a.folder} and {b.folder} have no item in common ({why}); run both on the same data, with the same "
            "--chunks and --seed"
        )
    return shared


def _text(record: ItemRecord) -> tuple[str, str]:
    """What was asked, whatever the tokenizer made of it."""
    return record.question, "".join(token for chunk in record.chunks for token in chunk)


def _compare(key: str, pairs: Sequence[tuple[Result, Result]], seed: int) -> dict[str, Any] | None:
    kind, figure = _FIGURES[key]
    values = [(x, y) for one, other in pairs if (x := figure(one)) is not None and (y := figure(other)) is not None]
    if not values or (kind == "ratio" and not any(x > 0 and y > 0 for x, y in values)):
        return None
    mine, theirs = [x for x, _ in values], [y for _, y in values]
    found = asdict(paired(mine, theirs, kind=kind, seed=seed))
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}
    return {"a": statistics.fmean(mine), "b": statistics.fmean(theirs), **finite}


def differing(a: Run, b: Run) -> list[dict[str, Any]]:
    """What the two runs were told or ran on that is not the same: rows of ``setting`` (dotted), ``a``, ``b``."""
    mine, theirs = _flat(a.meta), _flat(b.meta)
    found_out = ("config", "budget_one_kl", "noise_kl", "environment.date", "left_out.")  # no settings
    names = [name for name in dict.fromkeys((*mine, *theirs)) if not name.startswith(found_out)]
    return [
        {"setting": name, "a": mine.get(name), "b": theirs.get(name)}
        for name in names
        if mine.get(name) != theirs.get(name)
    ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def describe(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str | int | None, ...]]]:
    """Heads and cells of a table of `compare`'s rows, for people: both means, and what their comparison says."""
    shown = [key for key in _FIGURES if any(row[key] is not None for row in rows)]
    heads = {"kl": "KL", "f1": "F1", "rouge_l": "Rouge-L", "ttft": "TTFT ms"}
    cells = [(row["mode"], row["n"], *(_cell(key, row[key]) for key in shown)) for row in rows]
    return ("mode", "n", *(heads[key] for key in shown)), cells


def _cell(key: str, found: Mapping[str, Any] | None) -> str | None:
    if found is None:
        return None
    one, other = (f"{1e3 * found[side]:.0f}" if key == "ttft" else f"{found[side]:.3g}" for side in ("a", "b"))
    return f"{one} / {other}: {found['words']}"
