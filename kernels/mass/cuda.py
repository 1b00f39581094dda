"""attention_mass on NVIDIA GPUs by csrc/cuda/mass.cuh: mma.sync, from compute capability 8.0 on; bfloat16, float16."""

from __future__ import annotations

from struct import Struct

import torch

from blendkv.kernels import cuda_call
from blendkv.kernels.attention.cuda import cache_strides, log_block, logits, refuses_queries, refuses_width
from blendkv.kernels.types import AttentionParams, Paged, Statistic

_PACK = Struct("@7q13q3f4x").pack
"""``MassArgs`` of csrc/cuda/mass.cuh."""


def refuses(
    q: torch.Tensor,
    k: torch.Tensor | Paged,
    positions: torch.Tensor,
    params: AttentionParams,
    lse: torch.Tensor,
    statistic: Statistic,
    *,
    weigh_by: torch.Tensor | None,
) -> str | None:
    """Why the kernel cannot take these arguments; None if it can."""
    return refuses_queries(q, k, params) or refuses_width(q)


def run(
    q: torch.Tensor,
    k: torch.Tensor | Paged,
    positions: torch.Tensor,
    params: AttentionParams,
    lse: torch.Tensor,
    statistic: Statistic,
    *,
    weigh_by: torch.Tensor | None,
) -> torch.Tensor:
    """See `blendkv.kernels.attention_mass`.

    Weights of |V| are not negative; a negative one would have to reverse the maximum, and is not meant.
    """
    table = None
    if isinstance(k, Paged):
        keys, tokens, table = k.k, k.tokens, k.table.to(torch.int32).contiguous()
    else:
        keys, tokens = cuda_call.chunked(k), k.shape[0]
    queries, heads, dim = q.shape
    kv_heads = keys.shape[-2]
    if queries == 0 or tokens == 0:
        return q.new_zeros(tokens, dtype=torch.float32)
    q, positions, lse = cuda_call.chunked(q), positions.contiguous(), lse.float().contiguous()
    weights = None if weigh_by is None else weigh_by.float().contiguous()
    parts = q.new_empty(kv_heads, tokens, dtype=torch.float32)
    args = _PACK(
        *map(cuda_call.address, (q, keys, positions, table, lse, weights, parts)),
        queries, heads, kv_heads, tokens, dim, q.stride(0), q.stride(1), *cache_strides(keys), log_block(k),
        params.window or 0, statistic == "mean", *logits(params),
    )  # fmt: skip
    cuda_call.launch(f"mass_{'bf16' if q.dtype == torch.bfloat16 else 'f16'}", args, q.device)
    return parts.amax(0) if statistic == "max" else parts.sum(0).div_(queries * heads)
