"""Paged keys and values as contiguous ones, for backends that read no block table."""

from __future__ import annotations

import torch

from blendkv.kernels.types import Paged


def contiguous(k: torch.Tensor | Paged, v: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[S, kv_heads, dim]``; a paged pair is copied together."""
    if isinstance(k, Paged):
        k, v = (cache[k.table].flatten(0, 1)[: k.tokens] for cache in (k.k, k.v))
        return k, v
    assert v is not None
    return k, v
