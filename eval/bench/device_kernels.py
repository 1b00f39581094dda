"""The device check's kernels: every backend against FlashAttention's dense rate or a plain copy, by CUDA events.

Ratios of rates: attention by counted FLOPs (4 x head_dim per query head and pair that the mask lets through), the
memory-bound ops by bytes that must be read and written once, over the bytes per second of a plain copy.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from blendkv.eval.bench.kernels import QUESTION, SHAPES, Shape, usable
from blendkv.kernels import (
    AttentionParams,
    attention_mass,
    codes,
    kv_deviation,
    rope_shift_scatter,
    rope_table,
    selected_attention,
    testing,
)
from blendkv.kernels.types import Codec, Encoded

Call = Callable[[], object]
LONG = 0.2
"""Seconds from which three runs are enough."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a device check, in tokens, and shares of the tokens that are selected."""

    device: str = "cuda"
    shapes: tuple[str, ...] = ("llama-8b", "llama-70b")
    sizes: tuple[int, ...] = (8192, 32768)
    shares: tuple[float, ...] = (0.03, 0.05, 0.1)
    scattered: int = 32768
    codecs: tuple[Codec, ...] = ("raw", "fp8", "int8", "turbo4", "turbo3", "turbo2")
    repeats: int = 9


def seconds(call: Call, plan: Plan) -> float:
    """Median of several runs behind a warm-up, by CUDA events (by the clock without a GPU, to try the script)."""
    call()
    taken = [_once(call, plan.device)]
    repeats = 3 if taken[0] > LONG else plan.repeats
    return statistics.median([_once(call, plan.device) for _ in range(repeats)])


def _once(call: Call, device: str) -> float:
    if device != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _row(what: str, ours: str, took: float, work: float, theirs: str, rate: float, unit: str) -> dict[str, Any]:
    """A line of the report: our rate and its ratio to theirs; ``unit`` is TFLOP/s or GB/s."""
    scale = 1e12 if unit == "TFLOP/s" else 1e9
    own = work / took
    return {
        "what": what, "ours": ours, "ms": took * 1e3, "rate": own / scale, "unit": unit, "theirs": theirs,
        "their_rate": rate / scale, "ratio": own / rate,
    }  # fmt: skip


def _names(op: str, plan: Plan, green: Sequence[str]) -> list[str]:
    """Backends to measure: those that passed, and torch."""
    return [b for b in usable(op, plan.device) if b in green or b == "torch"]


def _forced(backend: str, call: Call) -> Call:
    def run() -> object:
        with testing.forced(backend):
            return call()

    return run


def _heads(tokens: int, heads: int, dim: int, device: str) -> torch.Tensor:
    """``[tokens, heads, dim]`` as the engine's cache holds it, head by head."""
    return torch.randn(heads, tokens, dim, device=device, dtype=torch.bfloat16).transpose(0, 1)


def copy_rate(plan: Plan) -> float:
    """Bytes per second of a large copy, read and written counted."""
    source = torch.randint(0, 255, (1 << (30 if plan.device == "cuda" else 22),), dtype=torch.uint8, device=plan.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), plan)


def _dense(shape: Shape, size: int, plan: Plan) -> dict[str, tuple[float, float]]:
    """(FLOP/s, seconds) of dense causal attention by torch's own fused kernels, by name."""
    q, k, v = (
        torch.randn(1, shape.q_heads, size, shape.head_dim, device=plan.device, dtype=torch.bfloat16) for _ in range(3)
    )
    flops = 4.0 * shape.head_dim * shape.q_heads * size * (size + 1) / 2
    found = {}
    for name, kind in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        if name == "cudnn" and plan.device != "cuda":
            continue
        try:
            with sdpa_kernel(kind):
                took = seconds(lambda: scaled_dot_product_attention(q, k, v, is_causal=True), plan)
        except RuntimeError as error:
            print(f"dense attention by {name} does not run here: {str(error).splitlines()[0]}", flush=True)
            continue
        found[name] = (flops / took, took)
    return found


def attention_rows(plan: Plan, green: Sequence[str]) -> Iterator[dict[str, Any]]:
    """`selected_attention` at a share of the positions, the question's included, against the dense rate."""
    rng = random.Random(0)
    for name in plan.shapes:
        shape = SHAPES[name]
        for size in plan.sizes:
            dense = _dense(shape, size, plan)
            k, v = (_heads(size, shape.kv_heads, shape.head_dim, plan.device) for _ in range(2))
            for share in plan.shares:
                chosen = rng.sample(range(size - QUESTION), int(share * size))
                places = torch.tensor(sorted(chosen) + list(range(size - QUESTION, size)), device=plan.device)
                q = torch.randn(len(places), shape.q_heads, shape.head_dim, device=plan.device, dtype=torch.bfloat16)
                params = AttentionParams(shape.head_dim**-0.5)
                flops = 4.0 * shape.head_dim * shape.q_heads * float((places + 1).sum())
                for backend in _names("attention", plan, green):
                    if backend == "torch" and share != plan.shares[0]:
                        continue
                    call = _forced(backend, partial(selected_attention, q, k, v, places, params))
                    took = seconds(call, plan)
                    for kind, (rate, whole) in dense.items():
                        what = f"attention {name} {size}, {share:.0%} selected"
                        row = _row(what, backend, took, flops, f"dense causal, {kind}", rate, "TFLOP/s")
                        yield {**row, "speed_up": whole / took}


def mass_rows(plan: Plan, green: Sequence[str], copied: float) -> Iterator[dict[str, Any]]:
    """`attention_mass` of a question, against one read of K at the copy's rate."""
    for name in plan.shapes:
        shape = SHAPES[name]
        for size in plan.sizes:
            places = torch.arange(size - QUESTION, size, device=plan.device)
            q = torch.randn(QUESTION, shape.q_heads, shape.head_dim, device=plan.device, dtype=torch.bfloat16)
            k = _heads(size, shape.kv_heads, shape.head_dim, plan.device)
            params = AttentionParams(shape.head_dim**-0.5)
            with testing.forced(green[0]):
                lse = selected_attention(q, k, k, places, params, want_lse=True).lse
            assert lse is not None
            for backend in _names("mass", plan, green):
                call = _forced(backend, partial(attention_mass, q, k, places, params, lse, "max"))
                what = f"mass {name}, {QUESTION} of {size}"
                yield _row(what, backend, seconds(call, plan), k.nbytes, "copy", copied, "GB/s")


def scatter_rows(plan: Plan, green: Sequence[str], copied: float) -> Iterator[dict[str, Any]]:
    """`rope_shift_scatter` of Llama-8B's K and V by codec, and `kv_deviation`, against the copy."""
    shape, tokens, device = SHAPES["llama-8b"], plan.scattered, plan.device
    outs = [_heads(tokens, shape.kv_heads, shape.head_dim, device) for _ in range(2)]
    angle = torch.rand(tokens, shape.head_dim // 2, device=device) * 6.28
    table = rope_table(angle.cos(), angle.sin(), "half")
    bias = torch.randn(shape.kv_heads, shape.head_dim, device=device)
    for codec in plan.codecs:
        form = (tokens, shape.kv_heads, shape.head_dim)
        raw = [torch.randn(form, device=device, dtype=torch.bfloat16) for _ in range(2)]
        k, v = raw if codec == "raw" else [codes.encode(t, codec) for t in raw]
        moved = sum(map(_bytes, (k, v))) + sum(t.nbytes for t in outs)
        for backend in _names("scatter", plan, green):
            move = partial(rope_shift_scatter, k, v, table, outs[0], outs[1], 0, k_bias=bias, v_bias=bias)
            call = _forced(backend, move)
            yield _row(f"scatter {codec}, {tokens}", backend, seconds(call, plan), moved, "copy", copied, "GB/s")
    sides = [_heads(tokens, shape.kv_heads, shape.head_dim, device) for _ in range(4)]
    for backend in _names("deviation", plan, green):
        took = seconds(_forced(backend, lambda: kv_deviation(*sides)), plan)
        moved = sum(t.nbytes for t in sides)
        yield _row(f"deviation, {tokens}", backend, took, moved, "copy", copied, "GB/s")


def _bytes(source: torch.Tensor | Encoded) -> int:
    if isinstance(source, Encoded):
        return source.data.nbytes + source.scale.nbytes
    return source.nbytes
