"""Load or recompute, before any request: what a corpus' chunk KV costs in bytes and seconds (`blendkv plan`).

The decision per request, from rates learned on the way, is `blendkv.blend.loading`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from blendkv.blend.causal import CausalSession
from blendkv.engines.base import ModelRunner, kv_bytes_per_token

_SAMPLE_BYTES = 64 << 20
_SAMPLE_TOKENS = 256
_ROUNDS = 3


@dataclass(frozen=True)
class Rates:
    """Measured on this machine: bytes per second from memory and disk, seconds of prefill per token."""

    memory_bytes_per_s: float
    disk_bytes_per_s: float
    prefill_s_per_token: float


def measure(runner: ModelRunner, folder: Path) -> Rates:
    """Time a copy in memory, a cold read of a file in ``folder``, and a short prefill; best of three each."""
    block = torch.from_numpy(np.random.default_rng(0).integers(0, 255, _SAMPLE_BYTES, dtype=np.uint8))
    target = block.clone()
    copy = min(_timed(lambda: target.copy_(block)) for _ in range(_ROUNDS))
    tokens = min(_SAMPLE_TOKENS, runner.context)
    ids = torch.arange(3, 3 + tokens, device=runner.device)
    positions = torch.arange(tokens, device=runner.device)
    with torch.inference_mode():
        prefill = min(_timed(lambda: runner.forward(ids, positions, CausalSession())) for _ in range(_ROUNDS))
    return Rates(_SAMPLE_BYTES / copy, _SAMPLE_BYTES / _cold_read(folder, block), prefill / tokens)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _cold_read(folder: Path, block: torch.Tensor) -> float:
    """Seconds to read the block back from disk with the page cache dropped (where the system can)."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(block.numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
        seconds = []
        for _ in range(_ROUNDS):
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            Path(file.name).read_bytes()
            seconds.append(time.perf_counter() - began)
    return min(seconds)


def plan_rows(runner: ModelRunner, tokens: int, reuse: float, rates: Rates) -> list[dict[str, float | str]]:
    """One row per tier for ``tokens`` tokens of chunk KV used ``reuse`` times.

    ``price`` is expected reuse x (recompute seconds - load seconds) / bytes, in seconds saved per GB.
    ``break_even_budget`` is the share r at which recomputing r of the tokens takes as long as loading them all:
    r T_prefill = bytes / bandwidth. Loading below that share hides behind the blend.
    """
    size = kv_bytes_per_token(runner) * tokens
    prefill = rates.prefill_s_per_token * tokens
    rows: list[dict[str, float | str]] = []
    for tier, bandwidth in (("memory", rates.memory_bytes_per_s), ("disk", rates.disk_bytes_per_s)):
        load = size / bandwidth
        rows.append(
            {
                "tier": tier,
                "bytes": size,
                "bytes_per_s": bandwidth,
                "load_s": load,
                "recompute_s": prefill,
                "break_even_budget": min(1.0, load / prefill),
                "seconds_saved_per_gb": reuse * (prefill - load) / (size / 1e9),
                "decision": "load" if load < prefill else "recompute",
            }
        )
    return rows
