"""Decode, shift, rotate and write, row by row in C++: ``csrc/cpu/scatter.cpp``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendkv.kernels import native
from blendkv.kernels.rotation import RopeTable
from blendkv.kernels.types import Encoded, Move, Trend

_NONE = (0, 0, 0)
"""Addresses of what there is not."""


def refuses(moves: Sequence[Move], k_out: torch.Tensor, v_out: torch.Tensor) -> str | None:
    """Why it cannot take the arguments: float64, an output with a strided head dim, or very wide encoded heads."""
    for name, out in (("k", k_out), ("v", v_out)):
        if out.dtype not in native.DTYPES:
            return f"it computes in float32, {name}_out is float64"
        if out.stride(-1) != 1 and out.shape[-1] > 1:
            return f"it writes heads whose values lie side by side, those of {name}_out do not"
    for move in moves:
        for source in move[:2]:
            if isinstance(source, torch.Tensor):
                if source.dtype not in native.DTYPES:
                    return "it computes in float32, a source is float64"
            elif source.dim > native.MOST_CODED:
                return f"it decodes head dims up to {native.MOST_CODED}, this is {source.dim}"
    return None


def _source(source: torch.Tensor | Encoded, kept: list[torch.Tensor]) -> tuple[int, ...]:
    """The first fields of ``Moved``; tensors made on the way are kept alive in ``kept``."""
    if isinstance(source, torch.Tensor):
        row, head, step = source.stride()
        if step == 1:
            return (source.data_ptr(), row, head, native.DTYPES[source.dtype], 0, 0, 0, 0)
        data = native.last_contiguous(source)
        coding: tuple[int, ...] = (native.DTYPES[data.dtype], 0, *_NONE)
    else:
        data = native.last_contiguous(source.data)
        parts = [source.scale.contiguous()]
        if source.signs is not None and source.codebook is not None:
            parts += [t.to(torch.float32).contiguous() for t in (source.signs, source.codebook)]
        kept += parts
        coding = (0, native.CODECS[source.codec], *(t.data_ptr() for t in parts), *_NONE[len(parts) :])
    kept.append(data)
    row, head, _ = data.stride()
    return (data.data_ptr(), row, head, *coding)


def _shift(bias: torch.Tensor | Trend | None, kept: list[torch.Tensor]) -> tuple[int, ...]:
    """Addresses of a shift's constant, slope and places along it."""
    if bias is None:
        return _NONE
    if isinstance(bias, torch.Tensor):
        constant = bias.contiguous()
        kept.append(constant)
        return constant.data_ptr(), 0, 0
    constant, slope, along = bias.constant.contiguous(), bias.slope.contiguous(), bias.along.contiguous()
    kept += (constant, slope, along)
    return constant.data_ptr(), slope.data_ptr(), along.data_ptr()


def _turn(table: RopeTable | None, kept: list[torch.Tensor]) -> tuple[int, ...]:
    """Addresses of cos and sin, their strides, and which dims are turned."""
    if table is None:
        return (0,) * 7
    rotated = table.cos.shape[-1]
    if table.pairing == "half":
        packed = table.packed
        kept.append(packed)
        cos, stride = packed.data_ptr(), packed.shape[1]
        return cos, cos + stride // 2 * packed.element_size(), stride, stride, rotated, table.offset, 0
    own = native.last_contiguous(table.cos), native.last_contiguous(table.sin)
    kept += own
    addresses, strides = (t.data_ptr() for t in own), (t.stride(0) for t in own)
    return (*addresses, *strides, rotated, table.offset, 1)


def run(moves: Sequence[Move], k_out: torch.Tensor, v_out: torch.Tensor) -> None:
    """See `blendkv.kernels.rope_shift_scatter_all`."""
    k_place = (*native.cache_of(k_out), native.DTYPES[k_out.dtype])
    v_place = (*native.cache_of(v_out), native.DTYPES[v_out.dtype])
    *sizes, heads, k_dim = k_out.shape
    v_dim, threads, scatter = v_out.shape[-1], torch.get_num_threads(), native.function("scatter")
    places, block = (sizes[0], 0) if len(sizes) == 1 else (sizes[0] * sizes[1], sizes[1])
    for k, v, table, slots, k_bias, v_bias in moves:
        kept: list[torch.Tensor] = []
        first, at = slots, 0
        if isinstance(first, torch.Tensor):
            listed = first.contiguous()
            kept.append(listed)
            first, at = 0, listed.data_ptr()
        tokens = (k if isinstance(k, torch.Tensor) else k.data).shape[0]
        scatter(
            native.SCATTER(
                *_source(k, kept), *k_place, *_shift(k_bias, kept), k_dim,
                *_source(v, kept), *v_place, *_shift(v_bias, kept), v_dim,
                *_turn(table, kept), at, first, places, block, tokens, heads, threads,
            )
        )  # fmt: skip
