"""The equation itself: all probabilities, then the statistic over queries and heads."""

from __future__ import annotations

import torch

from blendkv.kernels.attention.reference import scores
from blendkv.kernels.types import AttentionParams, Paged, Statistic


def refuses(*args: object, **kwargs: object) -> str | None:
    """Nothing."""
    return None


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
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = (k.k[k.table].flatten(0, 1)[: k.tokens] if isinstance(k, Paged) else k).to(wide)
    found = scores(q.to(wide), keys, positions, params)
    weights = (found - lse.to(wide).T.unsqueeze(-1)).exp().masked_fill(found == float("-inf"), 0.0)
    if weigh_by is not None:
        weights = weights * weigh_by.to(wide).T.repeat_interleave(q.shape[1] // keys.shape[1], 0)[:, None]
    if q.shape[0] == 0:
        return torch.zeros(keys.shape[0], dtype=wide, device=q.device)
    return weights.amax((0, 1)) if statistic == "max" else weights.mean((0, 1))
