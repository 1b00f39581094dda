"""One pass over the keys in C++, without a matrix of queries x keys: ``csrc/cpu/mass.cpp``."""

from __future__ import annotations

import torch

from blendkv.kernels import native
from blendkv.kernels.types import AttentionParams, Paged, Statistic


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
    """Why it cannot take the arguments: float64, a head dim above 256, or a scale that is not positive."""
    return native.refuses_scores(q, q.shape[2], params.scale)


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
    """See `blendkv.kernels.attention_mass`."""
    _alive, paging = native.paging_of(k)
    keys, tokens = (k.k, k.tokens) if isinstance(k, Paged) else (k, k.shape[0])
    keys, q, positions = native.last_contiguous(keys), native.last_contiguous(q), positions.contiguous()
    lse = lse.to(torch.float32).contiguous()
    weights = None if weigh_by is None else weigh_by.to(torch.float32).contiguous()
    mass = q.new_empty(tokens, dtype=torch.float32)
    queries, q_heads, head_dim = q.shape
    packed = native.MASS(
        q.data_ptr(), *q.stride()[:2], positions.data_ptr(), lse.data_ptr(),
        0 if weights is None else weights.data_ptr(), mass.data_ptr(), statistic == "mean",
        *native.cache_of(keys), *paging,
        queries, q_heads, keys.shape[-2], head_dim, tokens, params.window or 0, native.DTYPES[q.dtype],
        torch.get_num_threads(), params.scale, params.softcap or 0.0,
    )  # fmt: skip
    native.function("mass")(packed)
    return mass
