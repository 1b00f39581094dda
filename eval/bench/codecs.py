"""Codec rows of `blendkv bench store`: bytes, encode and decode rates beside a copy of the same run, and errors.

K and V are normal values, for which TurboQuant's errors are published. All layers of a set larger than the caches take
turns, as in a blend, which touches each once. A rate counts bytes of raw K and V; decoded ones, and the copy's, go
into new memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blendkv.errors import InputError
from blendkv.eval.bench.kernels import BEYOND_CACHES, SHAPES, Shape
from blendkv.store.base import Layer
from blendkv.store.codecs import CODECS, Codec

Parts = Mapping[str, torch.Tensor]
EXPECTED = {"raw": 0.0, "fp8": 0.00065, "int8": 0.00004, "turbo4": 0.00950, "turbo3": 0.03454, "turbo2": 0.1175}
"""Mean squared error over the mean square, of normal values: published (Max 1960, table I), or of the number format."""
_SLACK = 1.15
"""How far a measured error may exceed its expectation before the round trip counts as wrong."""


@dataclass(frozen=True)
class CodecSettings:
    """What is measured.

    Attributes
    ----------
    shapes
        Models whose attention layers are used; see `blendkv.eval.bench.kernels.SHAPES`.
    tokens
        Of a chunk.
    dtype
        Of K and V.
    rounds
        In which all take turns; medians are reported.
    threads
        Of torch.
    nbytes
        Raw K and V that the layers have together.
    """

    shapes: tuple[str, ...] = ("smollm2-135m", "llama-8b")
    tokens: int = 1200
    dtype: torch.dtype = torch.bfloat16
    rounds: int = 5
    threads: int = 1
    nbytes: int = BEYOND_CACHES

    def __post_init__(self) -> None:
        unknown = [s for s in self.shapes if s not in SHAPES]
        if unknown:
            raise InputError(f"unknown shape {unknown[0]!r}; allowed: {', '.join(SHAPES)}")
        for name in ("tokens", "rounds", "threads", "nbytes"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is allowed")


def codec_rows(settings: CodecSettings) -> list[dict[str, Any]]:
    """Measure every codec; rows of ``name, value, unit, baseline, ratio``.

    Rates are None for a codec whose round trip is wrong. ``baseline`` says what ``ratio`` is a ratio to.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with torch.inference_mode():
            return [row for shape in settings.shapes for row in _shape_rows(shape, settings)]
    finally:
        torch.set_num_threads(before)


def _shape_rows(name: str, settings: CodecSettings) -> list[dict[str, Any]]:
    layers = _layers(SHAPES[name], settings)
    raw = sum(t.nbytes for t in layers[0])
    stored = {codec: [CODECS.get(codec).encode(*layer) for layer in layers] for codec in CODECS.names()}
    errors = {codec: _error(CODECS.get(codec), layers[0], parts[0], settings.dtype) for codec, parts in stored.items()}
    rates = _rates(layers, stored, settings)
    rows = [_row(f"copy, {name}", raw / rates["copy"] / 1e9, "GB/s")]
    for codec, parts in stored.items():
        size = sum(t.nbytes for t in parts[0].values())
        rows.append(_row(f"{codec} bytes, {name}", size / settings.tokens, "B/token/layer", "raw", size / raw))
        wrong = not errors[codec] <= EXPECTED[codec] * _SLACK
        rows.append(_row(f"{codec} error, {name}", errors[codec], "mean square error / mean square"))
        if codec == "raw":  # nothing is done
            continue
        for what in ("encode", "decode"):
            seconds = rates[f"{codec} {what}"]
            value = None if wrong else raw / seconds / 1e9
            ratio = None if wrong else rates["copy"] / seconds
            rows.append(_row(f"{codec} {what}, {name}", value, "GB/s", "copy", ratio))
    return rows


def _row(
    name: str, value: float | None, unit: str, baseline: str | None = None, ratio: float | None = None
) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio}


def _layers(shape: Shape, settings: CodecSettings) -> list[Layer]:
    generator = torch.Generator().manual_seed(0)
    size = (settings.tokens, shape.kv_heads, shape.head_dim)
    count = -(-settings.nbytes // (2 * settings.dtype.itemsize * settings.tokens * shape.kv_heads * shape.head_dim))
    one = [torch.randn(size, generator=generator).to(settings.dtype) for _ in range(2)]
    return [(one[0].clone(), one[1].clone()) for _ in range(count)]


def _error(codec: Codec, layer: Layer, parts: Parts, dtype: torch.dtype) -> float:
    """The larger one of K's and V's relative errors; infinite if dtype or shape did not come back."""
    found = codec.decode(parts, str(dtype).removeprefix("torch."))
    if any(f.dtype != x.dtype or f.shape != x.shape for f, x in zip(found, layer, strict=True)):
        return float("inf")
    pairs = [(f.double(), x.double()) for f, x in zip(found, layer, strict=True)]
    return max(float((f - x).square().mean() / x.square().mean()) for f, x in pairs)


def _rates(layers: Sequence[Layer], stored: Mapping[str, Sequence[Parts]], settings: CodecSettings) -> dict[str, float]:
    """Median seconds per layer of ``copy`` and of each codec's ``encode`` and ``decode``."""
    dtype = str(settings.dtype).removeprefix("torch.")
    calls: dict[str, list[Callable[[], object]]] = {"copy": [_copy(layer) for layer in layers]}
    for name, parts in stored.items():
        if name != "raw":
            codec = CODECS.get(name)
            calls[f"{name} encode"] = [_encode(codec, layer) for layer in layers]
            calls[f"{name} decode"] = [_decode(codec, p, dtype) for p in parts]
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(settings.rounds):
        for name, every in calls.items():
            began = time.perf_counter()
            for call in every:
                call()
            seconds[name].append((time.perf_counter() - began) / len(every))
    return {name: statistics.median(values) for name, values in seconds.items()}


def _copy(layer: Layer) -> Callable[[], object]:
    return lambda: (layer[0].clone(), layer[1].clone())


def _encode(codec: Codec, layer: Layer) -> Callable[[], object]:
    return lambda: codec.encode(*layer)


def _decode(codec: Codec, parts: Parts, dtype: str) -> Callable[[], object]:
    return lambda: codec.decode(parts, dtype)
