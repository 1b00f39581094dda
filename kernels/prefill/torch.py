"""Chunk by chunk, by whatever computes `selected_attention` here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from blendkv.kernels.ops import selected_attention
from blendkv.kernels.types import AttentionParams


def refuses(*args: object, **kwargs: object) -> str | None:
    """Nothing."""
    return None


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    params: AttentionParams,
    before: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """See `blendkv.kernels.chunk_prefill`."""
    past = 0 if before is None else before[0].shape[0]
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    ramp = torch.arange(past + max(lengths, default=0), device=q.device)
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for first, last in pairwise(bounds):
        keys, values = k[first:last], v[first:last]
        if before is not None:
            keys, values = torch.cat((before[0], keys)), torch.cat((before[1], values))
        own = ramp[past : past + last - first]
        out[first:last] = selected_attention(q[first:last], keys, values, own, params).out
    return out
