"""Decode, shift, rotate and write, one after the other, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendkv.kernels.codes import decode
from blendkv.kernels.rotation import rotate
from blendkv.kernels.types import Encoded, Move, Trend


def refuses(*args: object, **kwargs: object) -> str | None:
    """Nothing."""
    return None


def run(moves: Sequence[Move], k_out: torch.Tensor, v_out: torch.Tensor) -> None:
    """See `blendkv.kernels.rope_shift_scatter_all`."""
    for move in moves:
        _move(move, k_out, v_out)


def _move(move: Move, k_out: torch.Tensor, v_out: torch.Tensor) -> None:
    """One chunk."""
    k, v, table, slots, k_bias, v_bias = move
    keys, values = (
        decode(source).to(out.dtype) if isinstance(source, Encoded) else source
        for source, out in ((k, k_out), (v, v_out))
    )
    k_bias, v_bias = (bias.per_token() if isinstance(bias, Trend) else bias for bias in (k_bias, v_bias))
    if isinstance(slots, int) and k_out.dim() == 3:
        place = slice(slots, slots + len(keys))
        rotate(keys, table, bias=k_bias, out=k_out[place])
        v_out[place].copy_(values if v_bias is None else values + v_bias)
        return
    if isinstance(slots, int):
        slots = torch.arange(slots, slots + len(keys), device=k_out.device)
    kept = slots >= 0
    moved = rotate(keys.float(), table, bias=k_bias)
    _write(k_out, slots[kept], moved[kept])
    _write(v_out, slots[kept], (values if v_bias is None else values + v_bias)[kept])


def _write(out: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows at their slots of a contiguous or paged output."""
    rows = rows.to(out.dtype)
    if out.dim() == 3:
        out[slots] = rows
    else:
        out[slots // out.shape[1], slots % out.shape[1]] = rows
