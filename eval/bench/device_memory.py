"""The device check's host memory: chunks from a daemon's arena to the GPU, page-locked against ordinary memory.

First what must hold: the arena can be registered, and what the daemon writes later is what arrives. Both are only
known on a real GPU with its driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from blendkv.daemon.arena import Arena, Window
from blendkv.daemon.pinning import Pinning
from blendkv.errors import StoreError
from blendkv.eval.bench.device_kernels import Plan, seconds


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes in bytes: of the arena, and of a chunk (1,200 tokens of an 8B model)."""

    arena: int = 1 << 30
    chunk: int = 157_286_400


def memory_rows(plan: Plan, memory: MemoryPlan, cudart: Any) -> Iterator[dict[str, Any]]:
    """Rates of copies to the device, and the ratio of the page-locked one.

    Raises
    ------
    StoreError
        If the arena cannot be registered, or bytes that were written after that do not arrive.
    """
    arena = Arena(memory.arena)
    window = Window(arena.reader_fd())
    random = np.random.default_rng(0).integers(0, 256, memory.chunk, np.uint8)
    np.frombuffer(arena.view(0, memory.chunk), np.uint8)[:] = random
    target = torch.empty(memory.chunk, dtype=torch.uint8, device=plan.device)
    before = _copy_seconds(plan, window, target)
    pinning = Pinning(cudart, torch.cuda.synchronize if plan.device == "cuda" else lambda: None)
    pinning.take(window)
    pinning.wait()
    if not pinning.used:
        raise StoreError("page-locking cannot be measured: the arena was not registered")
    np.frombuffer(arena.view(0, memory.chunk), np.uint8)[:] = random[::-1].copy()  # the daemon writes on
    after = _copy_seconds(plan, window, target)
    arrived = target.cpu().numpy()
    pinning.close()
    if not np.array_equal(arrived, random[::-1]):
        raise StoreError("page-locked memory cannot be used: what the daemon wrote later did not arrive")
    yield {
        "what": f"copy of {memory.chunk >> 20} MiB of the arena to the device", "ours": "pinned", "ms": after * 1e3,
        "rate": memory.chunk / after / 1e9, "unit": "GB/s", "theirs": "pageable", "ratio": before / after,
        "their_rate": memory.chunk / before / 1e9,
    }  # fmt: skip


def _copy_seconds(plan: Plan, window: Window, target: torch.Tensor) -> float:
    source = torch.from_numpy(np.frombuffer(window.view(0, target.numel()), np.uint8))
    return seconds(partial(target.copy_, source, non_blocking=True), plan)
