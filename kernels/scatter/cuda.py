"""rope_shift_scatter on NVIDIA GPUs by csrc/cuda/scatter.cu: eight values per lane from the load to the store."""

from __future__ import annotations

import ctypes

import torch

from blendkv.kernels import cuda_call
from blendkv.kernels.codes import block_of
from blendkv.kernels.rotation import RopeTable
from blendkv.kernels.types import BITS, Encoded

_CODECS = {"fp8": 1, "int8": 2, **{name: 10 + bits for name, bits in BITS.items()}}
_WIDEST = 256
"""A warp holds a whole vector of up to eight values per lane."""


class Side(ctypes.Structure):
    """``Side`` of csrc/cuda/scatter.cu: K or V."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "scale", "signs", "codebook", "bias", "out")),
        *((name, ctypes.c_longlong) for name in ("dim", "row", "head", "value", "width", "bias_row")),
        *((name, ctypes.c_longlong) for name in ("out_block", "out_row", "out_head", "out_value")),
        *((name, ctypes.c_longlong) for name in ("codec", "type", "out_type")),
    )


class Args(ctypes.Structure):
    """``ScatterArgs`` of csrc/cuda/scatter.cu."""

    _fields_ = (
        ("k", Side), ("v", Side),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "slots")),
        *((name, ctypes.c_longlong) for name in ("first", "tokens", "heads", "block_size")),
        *((name, ctypes.c_longlong) for name in ("rotated", "offset", "interleaved")),
    )  # fmt: skip


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
    if any(_dim(source) % 8 or _dim(source) > _WIDEST for source in (k, v)):
        return False
    tensors = [t for t in (k, v) if isinstance(t, torch.Tensor)]
    return all(map(cuda_call.in_chunks, (*tensors, k_out, v_out)))


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
    """Why the kernel cannot take these arguments; None if it can."""
    floats = [t.dtype for t in (k, v, k_out, v_out) if isinstance(t, torch.Tensor)]
    unknown = [str(d) for d in floats if d not in cuda_call.CODES]
    if unknown:
        return f"it reads and writes {', '.join(map(str, cuda_call.CODES))}, not {unknown[0]}"
    turbo = [t.codec for t in (k, v) if isinstance(t, Encoded) and t.codec in BITS]
    if turbo and not _by_eights(k, v, table, k_out, v_out):
        return f"{turbo[0]} takes vectors of up to {_WIDEST} values, rotated by 16s and written 16 bytes at a time"
    if k_out.shape[:-2].numel() >= 2**31 or max(k_out.shape[-2] * _dim(t) for t in (k, v)) >= 2**20:
        return "the output has too many places"
    return cuda_call.refuses_device(k_out.device)


def _side(source: torch.Tensor | Encoded, bias: torch.Tensor | None, out: torch.Tensor) -> tuple[Side, list[object]]:
    """The structure, and the tensors that must live as long."""
    shift = None if bias is None else bias.float().contiguous()
    side = Side(
        bias=cuda_call.address(shift), out=out.data_ptr(), dim=_dim(source),
        bias_row=0 if shift is None or shift.dim() == 2 else shift.stride(0),
        out_block=out.stride(0) if out.dim() == 4 else 0, out_row=out.stride(-3), out_head=out.stride(-2),
        out_value=out.stride(-1), out_type=cuda_call.CODES[out.dtype],
    )  # fmt: skip
    if isinstance(source, torch.Tensor):
        side.data, side.type = source.data_ptr(), cuda_call.CODES[source.dtype]
        side.row, side.head, side.value = source.stride()
        return side, [shift]
    kept = [
        None if t is None else cuda_call.chunked(t.contiguous())
        for t in (source.data.view(torch.uint8), source.scale, source.signs, source.codebook)
    ]
    side.data, side.scale, side.signs, side.codebook = map(cuda_call.address, kept)
    side.codec, side.width = _CODECS[source.codec], block_of(source.dim)
    return side, [shift, kept]


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
    tokens = len(k.data if isinstance(k, Encoded) else k)
    if tokens == 0 or k_out.shape[-2] == 0:
        return
    k_side, k_kept = _side(k, k_bias, k_out)
    v_side, v_kept = _side(v, v_bias, v_out)
    kept: list[object] = [k_kept, v_kept]
    args = Args(k=k_side, v=v_side, tokens=tokens, heads=k_out.shape[-2])
    args.block_size = k_out.shape[1] if k_out.dim() == 4 else 0
    if isinstance(slots, int):
        args.first = slots
    else:
        slots = slots.contiguous()
        args.slots = slots.data_ptr()
    if table is not None:
        cos, sin = cuda_call.chunked(table.cos[:, 0].contiguous()), cuda_call.chunked(table.sin[:, 0].contiguous())
        kept += [cos, sin]
        args.cos, args.sin, args.rotated = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        args.offset, args.interleaved = table.offset, table.pairing == "interleaved"
    kernel = "chunks" if _by_eights(k, v, table, k_out, v_out) else "values"
    cuda_call.launch(f"scatter_{kernel}", args, k_out.device)
