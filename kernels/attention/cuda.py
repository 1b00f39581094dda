"""selected_attention on NVIDIA GPUs by csrc/cuda/attention.cuh: mma.sync, from compute capability 8.0 on.

Hopper and later run the same kernel; there is none with wgmma or TMA. Bfloat16 and float16 alone: the products of
float32 would not be float32's. The deviation is the other kernel's, started just before: it sums over KV heads, which
attention's blocks do not share, and leaves K and V in the GPU's cache where they fit.
"""

from __future__ import annotations

import math
from struct import Struct

import torch

from blendkv.kernels import cuda_call
from blendkv.kernels.deviation import cuda as deviation
from blendkv.kernels.types import AttentionOutput, AttentionParams, Paged

_LOG2E = math.log2(math.e)
WIDEST = 256
"""Head dims up to here have a kernel."""
_PACK = Struct("@10q17q3f4x").pack
"""``AttentionArgs`` of csrc/cuda/attention_rows.cuh."""


def refuses(
    q: torch.Tensor,
    k: torch.Tensor | Paged,
    v: torch.Tensor | None,
    positions: torch.Tensor,
    params: AttentionParams,
    *,
    want_lse: bool,
    stored: tuple[torch.Tensor, torch.Tensor] | None,
) -> str | None:
    """Why the kernel cannot take these arguments; None if it can."""
    caches = (k.k, k.v) if isinstance(k, Paged) else (k, v)
    return refuses_queries(q, k, params) or next(filter(None, map(refuses_width, caches)), None)


def refuses_width(tensor: torch.Tensor | None) -> str | None:
    """Whether there is a kernel for a head dim."""
    if tensor is not None and (tensor.shape[-1] % 8 or not 8 <= tensor.shape[-1] <= WIDEST):
        return f"head dim {tensor.shape[-1]} is not a multiple of 8 up to {WIDEST}"
    return None


def refuses_queries(q: torch.Tensor, k: torch.Tensor | Paged, params: AttentionParams) -> str | None:
    """What both attention ops refuse."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it multiplies bfloat16 and float16, not {q.dtype}"
    if not (math.isfinite(params.scale) and params.scale > 0):
        return f"scale {params.scale} is not a positive number"
    if q.shape[0] * q.shape[1] >= 2**31:
        return f"{q.shape[0]} queries of {q.shape[1]} heads are too many rows"
    if isinstance(k, Paged):
        if k.k.shape[1].bit_count() != 1:
            return f"the paged cache's blocks hold {k.k.shape[1]} tokens, which is not a power of 2"
        if not all(map(cuda_call.in_chunks, (k.k, k.v))):
            return "the paged cache's vectors do not start at multiples of 16 bytes"
    return cuda_call.refuses_device(q.device)


def splits(rows: int, kv_heads: int, keys: int, rows_per_block: int, processors: int) -> int:
    """Over how many blocks the keys of a tile of rows are split, so that all multiprocessors have work.

    A multiprocessor holds two blocks, and tiles differ in length: twice as many blocks as fit at once even out. A split
    keeps 512 keys or more, below which joining costs more than it saves. Not measured.
    """
    blocks = max(1, math.ceil(rows / rows_per_block) * kv_heads)
    wanted = math.ceil(4 * processors / blocks)
    return max(1, min(wanted, keys // 512, 64))


def logits(params: AttentionParams) -> tuple[float, float, float]:
    """Factor, the factor inside a soft-cap, and the soft-cap (0 for none): the kernels' exponentials are of base 2."""
    if params.softcap is None:
        return params.scale * _LOG2E, 0.0, 0.0
    return _LOG2E, 2 * _LOG2E * params.scale / params.softcap, params.softcap


def log_block(k: torch.Tensor | Paged) -> int:
    """Logarithm to base 2 of a paged cache's block size."""
    return k.k.shape[1].bit_length() - 1 if isinstance(k, Paged) else 0


def cache_strides(cache: torch.Tensor) -> tuple[int, int, int]:
    """Strides of contiguous or paged keys or values: of blocks (0 where there are none), rows and heads."""
    strides = cache.stride()
    return (0, strides[0], strides[1]) if len(strides) == 3 else (strides[0], strides[1], strides[2])


def run(
    q: torch.Tensor,
    k: torch.Tensor | Paged,
    v: torch.Tensor | None,
    positions: torch.Tensor,
    params: AttentionParams,
    *,
    want_lse: bool,
    stored: tuple[torch.Tensor, torch.Tensor] | None,
) -> AttentionOutput:
    """See `blendkv.kernels.selected_attention`."""
    table = None
    if isinstance(k, Paged):
        keys, values, tokens, table = k.k, k.v, k.tokens, k.table.to(torch.int32).contiguous()
    else:
        assert v is not None
        keys, values, tokens = cuda_call.chunked(k), cuda_call.chunked(v), k.shape[0]
    moved = None if stored is None else deviation.run(keys, stored[0], values, stored[1], use_k=True, use_v=True)
    queries, heads, dim = q.shape
    kv_heads, v_dim = keys.shape[-2], values.shape[-1]
    out = q.new_empty(queries, heads, v_dim)
    lse = q.new_empty(queries, heads, dtype=torch.float32) if want_lse else None
    if queries == 0:
        return AttentionOutput(out, lse, moved)
    q, positions = cuda_call.chunked(q), positions.contiguous()
    sinks = None if params.sinks is None else params.sinks.float().contiguous()
    rows_per_block = 128 if max(dim, v_dim) <= 128 else 64
    parts = splits(
        queries * heads // kv_heads, kv_heads, tokens, rows_per_block, cuda_call.processors(q.device)
    )  # fmt: skip
    part_out = part_lse = None
    if parts > 1:
        part_out = q.new_empty(parts, queries * heads, v_dim, dtype=torch.float32)
        part_lse = q.new_empty(parts, queries * heads, dtype=torch.float32)
    args = _PACK(
        *map(cuda_call.address, (q, keys, values, positions, table, sinks, out, lse, part_out, part_lse)),
        queries, heads, kv_heads, tokens, dim, v_dim,
        q.stride(0), q.stride(1), *cache_strides(keys), *cache_strides(values), log_block(k),
        parts, params.window or 0, *logits(params),
    )  # fmt: skip
    cuda_call.launch(f"attention_{'bf16' if q.dtype == torch.bfloat16 else 'f16'}", args, q.device)
    return AttentionOutput(out, lse, moved)
