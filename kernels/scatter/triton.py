"""Decode, shift, rotate and write on a GPU, in one pass over K and one over V.

A program takes some tokens of one head after the other, and keeps the two members of every RoPE pair in two tiles, so
that a rotation is arithmetic between them and nothing is read twice; dims that are not rotated are split into halves.

TurboQuant's Hadamard matrix is multiplied in by tensor cores: its entries are made from the bits of their indices, and
are exact in float16, as is the codebook's value in two parts. Butterflies need fewer operations, but each of their
log2(width) steps would move the tile through shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from blendkv.kernels import codes, jit
from blendkv.kernels.rotation import RopeTable
from blendkv.kernels.scatter.triton_kernels import scatter
from blendkv.kernels.types import BITS, Encoded, Move, Trend

WIDEST = 512
"""Largest head dim: a program keeps a few tiles of tokens x half the dims in registers."""
TOKENS = {False: (16, 4), True: (64, 8)}
"""Tokens and warps of a program, without and with a Hadamard product (whose matrix is made once for all of them).

Not measured. Chosen so that sm_90 and gfx942 spill no registers at a head dim of 128 in the ``half`` pairing (sm_80
spills a few of turbo's); wider heads and interleaved pairs of turbo do spill.
"""
SIDE_BY_SIDE = 4
"""Programs per multiprocessor from which on one program takes all heads, and reads cos and sin once."""


def refuses(moves: Sequence[Move], k_out: torch.Tensor, v_out: torch.Tensor) -> str | None:
    """Float64, head dims above 512, an odd number of rotated dims, and tensors that are not on one GPU."""
    return next((why for move in moves if (why := _refuses(move, k_out, v_out))), None)


def _refuses(move: Move, k_out: torch.Tensor, v_out: torch.Tensor) -> str | None:
    k, v, table, slots, k_bias, v_bias = move
    parts: list[torch.Tensor | None] = [*_shift(k_bias), *_shift(v_bias), None if isinstance(slots, int) else slots]
    for source in (k, v):
        if isinstance(source, Encoded):
            parts += [source.scale, source.signs, source.codebook]
    if table is not None:
        parts += [table.cos, table.sin]
        if table.cos.shape[-1] % 2:
            return f"{table.cos.shape[-1]} rotated dims, which do not form pairs"
    dims = (k_out.shape[-1], v_out.shape[-1])
    if max(dims) > WIDEST:
        return f"a head dim of {max(dims)}; Triton's kernel goes up to {WIDEST}"
    return jit.unusable([k_out, v_out, *(s.data if isinstance(s, Encoded) else s for s in (k, v))], parts)


def run(moves: Sequence[Move], k_out: torch.Tensor, v_out: torch.Tensor) -> None:
    """See `blendkv.kernels.rope_shift_scatter_all`."""
    for move in moves:
        _chunk(move, k_out, v_out)


def _chunk(move: Move, k_out: torch.Tensor, v_out: torch.Tensor) -> None:
    """One chunk."""
    k, v, table, slots, k_bias, v_bias = move
    _move(k, table, k_out, slots, k_bias)
    _move(v, None, v_out, slots, v_bias)


def _move(
    source: torch.Tensor | Encoded,
    table: RopeTable | None,
    out: torch.Tensor,
    slots: torch.Tensor | int,
    bias: torch.Tensor | Trend | None,
) -> None:
    """K or V."""
    data, scale, signs, codebook, codec, bits = _parts(source)
    (tokens, heads), dim = data.shape[:2], out.shape[-1]
    if tokens == 0 or heads == 0 or dim == 0:
        return
    block, warps = TOKENS[bits > 0]
    blocks = triton.cdiv(tokens, block)
    groups = 1 if blocks >= SIDE_BY_SIDE * jit.cores(out.device) else heads
    cos, sin = (None, None) if table is None else (table.cos, table.sin)
    places = out.shape[:-2].numel()
    constant, slope, along = _shift(bias)
    with jit.on(out.device):
        scatter[(blocks * groups,)](
            data, scale, signs, codebook, cos, sin, constant, slope, along,
            None if isinstance(slots, int) else slots, out,
            data.stride(), (0, 0, 0) if scale is None else scale.stride(), _pair(cos), _pair(sin),
            out.stride() if out.dim() == 4 else (0, *out.stride()),
            slots if isinstance(slots, int) else 0, tokens, heads, groups, places,
            CODEC=codec, BITS=bits, DIM=dim, HADAMARD=codes.block_of(dim),
            ROTATED=0 if cos is None else cos.shape[-1], OFFSET=0 if table is None else table.offset,
            INTERLEAVED=table is not None and table.pairing == "interleaved",
            BIASED=bias is not None, TREND=slope is not None,
            LISTED=not isinstance(slots, int), PAGE=out.shape[1] if out.dim() == 4 else 0,
            BLOCK_T=block, HALF=jit.padded(dim, 32) // 2, num_warps=warps, num_stages=1,
        )  # fmt: skip


_Parts = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, str, int]


def _parts(source: torch.Tensor | Encoded) -> _Parts:
    """Data, scale, signs, codebook, codec and bits per index (0 for one value per dim)."""
    if isinstance(source, torch.Tensor):
        return source, None, None, None, "raw", 0
    # Triton reads this format only on sm_89 and newer: the kernel decodes its bits.
    data = source.data.view(torch.uint8) if source.codec == "fp8" else source.data
    codec, bits = ("turbo", BITS[source.codec]) if source.codec in BITS else (source.codec, 0)
    return data, source.scale, source.signs, source.codebook, codec, bits


def _pair(table: torch.Tensor | None) -> tuple[int, int]:
    """Strides of cos or sin ``[tokens, 1, dims]``."""
    return (0, 0) if table is None else (table.stride(0), table.stride(2))


def _shift(bias: torch.Tensor | Trend | None) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Constant and slope, contiguous, and the tokens' places along it; None for what there is not."""
    if isinstance(bias, Trend):
        return bias.constant.contiguous(), bias.slope.contiguous(), bias.along.contiguous()
    return None if bias is None else bias.contiguous(), None, None
