"""Token by token and head by head, as the equations read, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blendkv.kernels.codes import decode
from blendkv.kernels.rotation import RopeTable
from blendkv.kernels.types import Move, Trend


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
    keys, values = decode(k).double(), decode(v).double()
    keys, values = _shifted(keys, k_bias), _shifted(values, v_bias)
    for token in range(len(keys)):
        slot = slots + token if isinstance(slots, int) else int(slots[token])
        if slot < 0:
            continue
        place = (slot,) if k_out.dim() == 3 else divmod(slot, k_out.shape[1])
        k_out[place] = _turn(keys[token], table, token).to(k_out.dtype)
        v_out[place] = values[token].to(v_out.dtype)


def _shifted(vectors: torch.Tensor, bias: torch.Tensor | Trend | None) -> torch.Tensor:
    """Every token's vectors and what is added to them."""
    if isinstance(bias, Trend):
        return vectors + bias.constant + bias.along.double()[:, None, None] * bias.slope
    return vectors if bias is None else vectors + bias


def _turn(vectors: torch.Tensor, table: RopeTable | None, token: int) -> torch.Tensor:
    """Each pair (a, b) of every head's vector becomes (a cos - b sin, b cos + a sin)."""
    if table is None:
        return vectors
    turned, dims = vectors.clone(), table.cos.shape[-1]
    for pair in range(dims // 2):
        a, b = (pair, pair + dims // 2) if table.pairing == "half" else (2 * pair, 2 * pair + 1)
        cos, sin = table.cos[token, 0, b].double(), table.sin[token, 0, b].double()
        first, second = vectors[:, table.offset + a], vectors[:, table.offset + b]
        turned[:, table.offset + a] = first * cos - second * sin
        turned[:, table.offset + b] = second * cos + first * sin
    return turned
