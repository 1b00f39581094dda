"""What a model's prefill and loads cost on this machine, for the simulator."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from blendkv.blend.causal import CausalSession
from blendkv.blend.plan import measure
from blendkv.engines.base import ModelRunner, kv_bytes_per_token
from blendkv.market.costs import CostModel, quadratic_fit

_LONG = 1024
_SHORT = 128
_ROUNDS = 3


def measured_costs(runner: ModelRunner) -> CostModel:
    """Measure a model: the memory tier's rate (`blendkv.blend.plan.measure`), and prefills of two lengths.

    Prefill of n tokens takes linear n + quadratic n^2 / 2 seconds; both constants follow from the two lengths.
    """
    with tempfile.TemporaryDirectory(prefix="blendkv-bench-") as folder:
        rates = measure(runner, Path(folder))
    long = min(_LONG, runner.context)
    linear, quadratic = quadratic_fit((_SHORT, _prefill(runner, _SHORT)), (long, _prefill(runner, long)))
    return CostModel(linear, quadratic, rates.memory_bytes_per_s, 0.0, kv_bytes_per_token(runner))


def _prefill(runner: ModelRunner, tokens: int) -> float:
    """Seconds, best of some."""
    ids = torch.arange(3, 3 + tokens, device=runner.device) % 100 + 3
    positions = torch.arange(tokens, device=runner.device)
    seconds = []
    with torch.inference_mode():
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            runner.forward(ids, positions, CausalSession())
            if runner.device.type == "cuda":
                torch.cuda.synchronize(runner.device)
            seconds.append(time.perf_counter() - began)
    return min(seconds)
