"""Summary rows: one per mode, the same for `demo`, `eval run` and the benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blendkv.blend import BlendSummary, Mode
from blendkv.eval.fidelity import Fidelity


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """p20, p50 and p80 in milliseconds; None for no sample."""
    if not seconds:
        return None
    values = np.percentile(np.asarray(seconds) * 1e3, (20, 50, 80))
    return {name: round(float(v), 3) for name, v in zip(("p20", "p50", "p80"), values, strict=True)}


@dataclass
class ModeSamples:
    """What was measured of one mode, over items and repeats."""

    mode: Mode
    ttft: list[float] = field(default_factory=list)
    fidelity: list[Fidelity] = field(default_factory=list)
    reports: list[BlendSummary] = field(default_factory=list)
    bytes_loaded: int = 0

    def row(self, full: ModeSamples | None) -> dict[str, Any]:
        """The summary row; what was not measured is None. ``full`` is the mode that speed-ups are against."""
        settings = self.mode.settings
        kl = [f.kl for f in self.fidelity]
        times = percentiles_ms(self.ttft)
        base = percentiles_ms(full.ttft) if full else None
        return {
            "mode": str(self.mode),
            "selector": settings.selector if settings and self.mode.name == "blend" else None,
            "budget_asked": settings.asked if settings else None,
            "budget_spent": _mean([r.budget_spent for r in self.reports]),
            "n": len(self.fidelity),
            "f1": None,
            "em": None,
            "rouge_l": None,
            "kl": _mean(kl),
            "kl_se": statistics.stdev(kl) / len(kl) ** 0.5 if len(kl) > 1 else None,
            "top1": _mean([f.top1 for f in self.fidelity]),
            "ttft_ms": times,
            "speedup_p50": round(base["p50"] / times["p50"], 3) if base and times else None,
            "bytes_loaded": self.bytes_loaded,
        }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
