"""Decode, shift, rotate and write, one after the other, in plain torch."""

from __future__ import annotations

import torch

from blendkv.kernels.codes import decode
from blendkv.kernels.rotation import RopeTable, rotate
from blendkv.kernels.types import Encoded


def refuses(*args: object, **kwargs: object) -> str | None:
    """Nothing."""
    return None


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
    keys, values = decode(k), decode(v)
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
