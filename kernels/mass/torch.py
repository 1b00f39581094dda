"""Tiles of queries in plain torch: a tile's scores are kept, never the whole matrix."""

from __future__ import annotations

import torch

from blendkv.kernels import tiles
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
    keys = k.k[k.table].flatten(0, 1)[: k.tokens] if isinstance(k, Paged) else k
    mass = torch.zeros(keys.shape[0], dtype=wide, device=q.device)
    group = q.shape[1] // keys.shape[1]
    parts = list(tiles.split_products(positions, q, keys.shape[0], group, params.window))
    for head in range(keys.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        own = keys[:, head].to(wide).contiguous()
        for tile in parts:
            seen = slice(tile.low, tile.high)
            found = tiles.scores(q[tile.rows, heads].to(wide), own[seen], tile, params)
            # A query that sees nothing has a log-sum-exp of minus infinity, and only hidden keys.
            limit = lse[tile.rows, heads].to(wide).clamp(min=torch.finfo(wide).min).reshape(-1, 1)
            weights = found.sub_(limit).exp_()
            if weigh_by is not None:
                weights.mul_(weigh_by[seen, head].to(wide))
            total = mass[seen]
            if statistic == "max":
                torch.maximum(total, weights.amax(0), out=total)
            else:
                total.add_(weights.sum(0))
    return mass if statistic == "max" else mass.div_(max(1, q.shape[0] * q.shape[1]))
