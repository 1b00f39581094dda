"""rope_shift_scatter on NVIDIA GPUs by csrc/cuda/scatter.cu: eight values per lane from the load to the store."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

import torch

from blendkv.kernels import cuda_call
from blendkv.kernels.codes import block_of
from blendkv.kernels.rotation import RopeTable
from blendkv.kernels.types import BITS, Encoded, Move, Trend

_CODECS = {"fp8": 1, "int8": 2, **{name: 10 + bits for name, bits in BITS.items()}}
_WIDEST = 256
"""A warp holds a whole vector of up to eight values per lane."""


_PACK = Struct("@20q20q3q4q3q").pack
"""``ScatterArgs`` of csrc/cuda/scatter.cu, two ``Side`` first."""


def _dim(source: torch.Tensor | Encoded) -> int:
    return source.dim if isinstance(source, Encoded) else source.shape[-1]


def _by_eights(
    k: torch.Tensor | Encoded,
    v: torch.Tensor | Encoded,
    table: RopeTable | None,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> bool:
    """Whether everything goes by eights: the fast kernel's condition, and turbo's."""
    if table is not None and (table.offset % 8 or table.cos.shape[-1] % 16):
        return False
    for source in (k, v):
        if _dim(source) % 8 or _dim(source) > _WIDEST:
            return False
        if isinstance(source, torch.Tensor) and not cuda_call.in_chunks(source):
            return False
    return cuda_call.in_chunks(k_out) and cuda_call.in_chunks(v_out)


def refuses(moves: Sequence[Move], k_out: torch.Tensor, v_out: torch.Tensor) -> str | None:
    """Why the kernel cannot take these arguments; None if it can."""
    return next((why for move in moves if (why := _refuses(move, k_out, v_out))), None)


def _refuses(move: Move, k_out: torch.Tensor, v_out: torch.Tensor) -> str | None:
    k, v, table, *_ = move
    floats = [t.dtype for t in (k, v, k_out, v_out) if isinstance(t, torch.Tensor)]
    unknown = [str(d) for d in floats if d not in cuda_call.CODES]
    if unknown:
        return f"it reads and writes {', '.join(map(str, cuda_call.CODES))}, not {unknown[0]}"
    turbo = [t.codec for t in (k, v) if isinstance(t, Encoded) and t.codec in BITS]
    if turbo and not _by_eights(k, v, table, k_out, v_out):
        return f"{turbo[0]} takes vectors of up to {_WIDEST} values, rotated by 16s and written 16 bytes at a time"
    tokens, heads = len(k.data if isinstance(k, Encoded) else k), k_out.shape[-2]
    if max(k_out.shape[:-2].numel(), tokens * heads) >= 2**30 or max(heads * _dim(t) for t in (k, v)) >= 2**20:
        return "there are too many places, or vectors to move"
    return cuda_call.refuses_device(k_out.device)


def _side(
    source: torch.Tensor | Encoded, bias: torch.Tensor | Trend | None, out: torch.Tensor
) -> tuple[tuple[int, ...], list[torch.Tensor | None]]:
    """The fields of ``Side``, and the tensors that must live as long."""
    strides = out.stride()
    shift = (bias.constant, bias.slope, bias.along) if isinstance(bias, Trend) else (bias, None, None)
    place = (strides[0] if len(strides) == 4 else 0, *strides[-3:])
    kind = cuda_call.CODES[out.dtype]
    if isinstance(source, torch.Tensor):
        parts: list[torch.Tensor | None] = [source, None, None, None]
        row, head, value = source.stride()
        form = (source.shape[-1], row, head, value, 1)
        codec = (0, cuda_call.CODES[source.dtype], kind)
    else:
        given = (source.data.view(torch.uint8), source.scale, source.signs, source.codebook)
        parts = [None if t is None else cuda_call.packed(t) for t in given]
        form = (source.dim, 0, 0, 0, block_of(source.dim))
        codec = (_CODECS[source.codec], 0, kind)
    kept = [*parts, *(None if t is None else cuda_call.packed(t) for t in shift)]
    return (*map(cuda_call.address, kept), out.data_ptr(), *form, *place, *codec), kept


def run(moves: Sequence[Move], k_out: torch.Tensor, v_out: torch.Tensor) -> None:
    """See `blendkv.kernels.rope_shift_scatter_all`."""
    for move in moves:
        _move(move, k_out, v_out)


def _move(move: Move, k_out: torch.Tensor, v_out: torch.Tensor) -> None:
    """One chunk."""
    k, v, table, slots, k_bias, v_bias = move
    tokens = len(k.data if isinstance(k, Encoded) else k)
    if tokens == 0 or k_out.shape[-2] == 0:
        return
    k_side, k_kept = _side(k, k_bias, k_out)
    v_side, v_kept = _side(v, v_bias, v_out)
    cos = sin = None
    rotation = (0, 0, 0)
    if table is not None:
        cos, sin = cuda_call.packed(table.cos), cuda_call.packed(table.sin)
        rotation = (cos.shape[-1], table.offset, int(table.pairing == "interleaved"))
    places = None if isinstance(slots, int) else slots.contiguous()
    args = _PACK(
        *k_side, *v_side, *map(cuda_call.address, (cos, sin, places)),
        slots if isinstance(slots, int) else 0, tokens, k_out.shape[-2], k_out.shape[1] if k_out.dim() == 4 else 0,
        *rotation,
    )  # fmt: skip
    kernel = "scatter_chunks" if _by_eights(k, v, table, k_out, v_out) else "scatter_values"
    cuda_call.launch(kernel, args, k_out.device)
    del k_kept, v_kept  # until here, copies must live: afterwards their memory is the stream's to reuse
