"""Small random chunk KVs, the same for the same number in every process."""

from __future__ import annotations

import numpy as np
import torch

from blendkv.types import ChunkKV, Recipe, as_token_ids


def make_kv(
    number: int,
    *,
    tokens: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    dims: tuple[tuple[int, int], ...] = ((4, 4), (3, 7)),
    heads: int = 2,
    fingerprint: str = "model",
    tenant: str = "",
) -> ChunkKV:
    """Chunk ``number``; ``dims`` holds the head dims of K and V of each layer. 180 bytes of K and V by default."""
    generator = torch.Generator().manual_seed(number)

    def tensor(dim: int) -> torch.Tensor:
        return torch.randn(tokens, heads, dim, generator=generator).to(dtype)

    ids = as_token_ids(np.random.default_rng(number).integers(0, 50_000, tokens))
    recipe = Recipe("bos", (1, 7), str(dtype).removeprefix("torch."), tenant=tenant)
    k = tuple(tensor(k_dim) for k_dim, _ in dims)
    v = tuple(tensor(v_dim) for _, v_dim in dims)
    return ChunkKV(fingerprint, recipe, ids, k, v)
