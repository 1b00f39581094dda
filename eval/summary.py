"""From a run's results to ``summary.json``: a row per mode, with errors and paired comparisons over the same items."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from blendkv.eval.items import Result, Run, RunFolder
from blendkv.eval.load import read_load
from blendkv.eval.report import write_report
from blendkv.eval.rows import percentiles_ms
from blendkv.eval.stats import bootstrap_se, paired

QUALITY = ("f1", "em", "rouge_l", "f1_full", "kl", "kl_first", "kl_gold", "top1")
_STAGES = ("score", "load", "rotate", "recompute", "question")


def summarise(run: Run, load: Mapping[str, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """One row per mode, in the order of the run.

    Parameters
    ----------
    run
        Read from its folder.
    load
        What was measured under Poisson load, by mode.

    Returns
    -------
    list
        Means over items with standard errors by bootstrap over items; ``speedup_p50`` is the ratio of the medians,
        ``speedup`` the geometric mean over items of full prefill's time over the mode's with its 95 % interval;
        ``against`` compares with every other mode on the items that both have. While correctness is red, no
        speed-up is given. What was not measured is None.
    """
    by_mode = {mode: {r.item: r for r in run.results if r.mode == mode} for mode in run.modes}
    seed = int(run.meta["seed"])
    return [_row(run, mode, by_mode, seed, (load or {}).get(mode)) for mode in run.modes]


def _row(
    run: Run, mode: str, by_mode: Mapping[str, Mapping[str, Result]], seed: int, load: Mapping[str, Any] | None
) -> dict[str, Any]:
    results = list(by_mode[mode].values())
    full = by_mode.get("full")
    times = percentiles_ms([t for r in results for t in r.ttft_s])
    base = percentiles_ms([t for r in full.values() for t in r.ttft_s]) if full else None
    timed = bool(run.meta["correct"]) and base is not None and times is not None
    row: dict[str, Any] = {
        "mode": mode,
        "selector": results[0].selector if mode != "reuse" else None,
        "budget_asked": _mean([r.budget_asked for r in results]),
        "budget_spent": _mean([r.budget_spent for r in results]),
        "n": len(results),
    }
    for name in QUALITY:
        values = [v for r in results if (v := getattr(r, name)) is not None]
        row[name], row[f"{name}_se"] = _mean(values), bootstrap_se(values, seed) if len(values) > 1 else None
    row |= {
        "ttft_ms": times,
        "speedup_p50": round(base["p50"] / times["p50"], 3) if timed and base and times else None,
        "speedup": _speedup(full, by_mode[mode], seed) if timed and full else None,
        "bytes_loaded": sum(r.bytes_loaded or 0 for r in results),
        "engine": results[0].engine,
        "nominal": results[0].nominal,
        "ceiling": _mean([float(run.items[r.item].ceiling) for r in results if r.task == "qa" and r.item in run.items]),
        "stages_ms": _stages(results),
        "against": {
            other: _against(by_mode[mode], theirs, seed, timed) for other, theirs in by_mode.items() if other != mode
        },
        "fallbacks": dict(Counter(r.fallback for r in results if r.fallback is not None)),
        "prediction_error": _prediction_error(results),
        "load": None if load is None else dict(load),
    }
    return row


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def median_ttft(result: Result) -> float:
    """Seconds: the median of an item's repeats."""
    return statistics.median(result.ttft_s)


def _speedup(full: Mapping[str, Result], mine: Mapping[str, Result], seed: int) -> dict[str, float] | None:
    shared = [i for i in mine if i in full]
    if not shared:
        return None
    found = paired(
        [median_ttft(full[i]) for i in shared], [median_ttft(mine[i]) for i in shared], kind="ratio", seed=seed
    )
    return _finite({"estimate": found.estimate, "low": found.low, "high": found.high})


def _against(mine: Mapping[str, Result], theirs: Mapping[str, Result], seed: int, timed: bool) -> dict[str, Any]:
    """Paired comparisons of a mode with another on the items of both: KL and TTFT as ratios, F1 as a difference."""
    shared = [(mine[i], theirs[i]) for i in mine if i in theirs]
    found: dict[str, Any] = {}
    kinds: Mapping[str, Literal["difference", "ratio"]] = {"kl": "ratio", "f1": "difference", "rouge_l": "difference"}
    for name, kind in kinds.items():
        pairs = [
            (a, b) for x, y in shared if (a := getattr(x, name)) is not None and (b := getattr(y, name)) is not None
        ]
        if pairs and (kind == "difference" or any(a > 0 and b > 0 for a, b in pairs)):
            ours, others = [a for a, _ in pairs], [b for _, b in pairs]
            found[name] = _finite(asdict(paired(ours, others, kind=kind, seed=seed)))
    if timed and shared:
        ours, others = [median_ttft(x) for x, _ in shared], [median_ttft(y) for _, y in shared]
        found["ttft"] = _finite(asdict(paired(ours, others, kind="ratio", seed=seed)))
    return found


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """None for what JSON cannot say: the interval of a single item has no end."""
    return {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()}


def _stages(results: Sequence[Result]) -> dict[str, float | None]:
    """Medians over items, in milliseconds."""
    known = [r.stages_s for r in results if r.stages_s]
    return {
        name: round(float(np.median([s.get(name, 0.0) for s in known])) * 1e3, 3) if known else None for name in _STAGES
    }


def _prediction_error(results: Sequence[Result]) -> float | None:
    """Median over items of |predicted - measured| / measured time of the blend."""
    errors = []
    for result in results:
        if result.predicted_s is not None and result.stages_s:
            measured = sum(v for name, v in result.stages_s.items() if name != "question")
            errors.append(abs(result.predicted_s["total"] - measured) / measured)
    return float(np.median(errors)) if errors else None


def write_summary(folder: Path) -> list[dict[str, Any]]:
    """Write ``summary.json`` and ``report.html`` from what a run's folder holds; returns the rows.

    Raises
    ------
    InputError
        If the folder holds no run.
    """
    run = RunFolder(folder).read()
    rows = summarise(run, read_load(folder))
    (folder / "summary.json").write_text(json.dumps(rows, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    write_report(run, rows, folder / "report.html")
    return rows
