"""Decode, shift, rotate and write, row by row in C++: ``csrc/cpu/scatter.cpp``."""

from __future__ import annotations

import torch

from blendkv.kernels import native
from blendkv.kernels.rotation import RopeTable
from blendkv.kernels.types import BITS, Encoded

CODECS = {"fp8": 1, "int8": 2, **{name: 8 + bits for name, bits in BITS.items()}}
MOST_CODED = 1024
"""Largest head dim of an encoded source."""


def refuses(
    k: torch.Tensor | Encoded,
    v: torch.Tensor | Encoded,
    table: RopeTable | None,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    slots: torch.Tensor | int,
    k_bias: torch.Tensor | None,
    v_bias: torch.Tensor | None,
) -> str | None:
    """Why it cannot take the arguments: float64, an output with a strided head dim, or very wide encoded heads."""
    for name, source, out in (("k", k, k_out), ("v", v, v_out)):
        if out.dtype not in native.DTYPES or (isinstance(source, torch.Tensor) and source.dtype not in native.DTYPES):
            return f"it computes in float32, {name} or its output is float64"
        if out.stride(-1) != 1 and out.shape[-1] > 1:
            return f"it writes heads whose values lie side by side, those of {name}_out do not"
        if isinstance(source, Encoded) and source.dim > MOST_CODED:
            return f"it decodes head dims up to {MOST_CODED}, this is {source.dim}"
    return None


def _side(
    source: torch.Tensor | Encoded, out: torch.Tensor, bias: torch.Tensor | None, kept: list[torch.Tensor]
) -> tuple[int, ...]:
    """The fields of ``Moved``; tensors made on the way are kept alive in ``kept``."""
    if isinstance(source, torch.Tensor):
        data, dim = native.last_contiguous(source), source.shape[2]
        coding: tuple[int, ...] = (native.DTYPES[data.dtype], 0, 0, 0, 0)
    else:
        data, dim, scale = native.last_contiguous(source.data), source.dim, source.scale.contiguous()
        kept.append(scale)
        tables = [0, 0]
        if source.signs is not None and source.codebook is not None:
            own = [t.to(torch.float32).contiguous() for t in (source.signs, source.codebook)]
            kept += own
            tables = [t.data_ptr() for t in own]
        coding = (0, CODECS[source.codec], scale.data_ptr(), *tables)
    shift: tuple[int, ...] = (0, 0, 0)
    if bias is not None:
        bias = native.last_contiguous(bias.to(torch.float32))
        kept.append(bias)
        shift = (bias.data_ptr(), *(bias.stride()[:2] if bias.dim() == 3 else (0, bias.stride(0))))
    kept.append(data)
    return (data.data_ptr(), *data.stride()[:2], *coding, *native.cache_of(out), native.DTYPES[out.dtype], *shift, dim)


def run(
    k: torch.Tensor | Encoded,
    v: torch.Tensor | Encoded,
    table: RopeTable | None,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    slots: torch.Tensor | int,
    k_bias: torch.Tensor | None,
    v_bias: torch.Tensor | None,
) -> None:
    """See `blendkv.kernels.rope_shift_scatter`."""
    kept: list[torch.Tensor] = []
    sides = (*_side(k, k_out, k_bias, kept), *_side(v, v_out, v_bias, kept))
    turn: tuple[int, ...] = (0,) * 7
    if table is not None:
        cos, sin = native.last_contiguous(table.cos), native.last_contiguous(table.sin)
        turn = (cos.data_ptr(), sin.data_ptr(), cos.stride(0), sin.stride(0),
                cos.shape[-1], table.offset, table.pairing == "interleaved")  # fmt: skip
    first, places = (slots, None) if isinstance(slots, int) else (0, slots.contiguous())
    data = k if isinstance(k, torch.Tensor) else k.data
    packed = native.SCATTER(
        *sides, *turn, 0 if places is None else places.data_ptr(), first,
        k_out.shape[1] if k_out.dim() == 4 else 0, data.shape[0], data.shape[1], torch.get_num_threads(),
    )  # fmt: skip
    native.function("scatter")(packed)
