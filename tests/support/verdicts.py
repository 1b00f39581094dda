"""Verdicts of the quality gate, made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blendkv.blend.gate import Evidence, Target, Verdict, write_verdict


def verdict(*modes: str, **changed: Any) -> Verdict:
    """One that passed ``modes``, the first of which is the cheapest; without any, one that failed."""
    row = Evidence("blend:strided@0.02", "confirm", 30, 0.9, 1.1, -0.1, -0.2, 0.02, 0.1, 0.2, False)
    rows = tuple(Evidence(m, "confirm", 30, 0.01, 0.02, 0.0, -0.01, 0.05, 0.1, 0.2, True) for m in modes)
    values: dict[str, Any] = {
        "passed": bool(modes), "summary": "KL 0.02" if modes else "KL 0.9, allowed 0.05",
        "mode": modes[0] if modes else None, "modes": modes, "target": Target(), "evidence": (*rows, row),
        "data": {"source": "made up", "items": 30}, "model": "tiny", "dtype": "float32", "recipe": "system",
        "engine": "torch", "environment": {"cpu": "any"}, "version": "0", "date": "2026-01-02T03:04:05+00:00",
    }  # fmt: skip
    return Verdict(**{**values, **changed})


def put_verdict(folder: Path, fingerprint: str, *modes: str) -> Path:
    """Write one beside a store, or into the user's folder."""
    return write_verdict(folder, fingerprint, verdict(*modes))
