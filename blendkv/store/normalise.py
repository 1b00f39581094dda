"""Checks a chunk KV before it is stored, and brings its tensors into the form in which they are held."""

from __future__ import annotations

import numpy as np
import torch

from blendkv.errors import InputError
from blendkv.store.codecs import CODECS
from blendkv.types import ChunkKV


def normalised(kv: ChunkKV) -> ChunkKV:
    """Return ``kv`` with every tensor contiguous, on the CPU, detached, and alone in its memory.

    A view into a larger tensor is copied: it would keep all of that in memory behind the byte limit's back.

    Raises
    ------
    InputError
        If the tensors do not fit the token ids, the recipe or each other.
    """
    _check(kv)
    k, v = tuple(_own(t) for t in kv.k), tuple(_own(t) for t in kv.v)
    if all(new is old for new, old in zip((*k, *v), (*kv.k, *kv.v), strict=True)):
        return kv
    return ChunkKV(kv.fingerprint, kv.recipe, kv.token_ids, k, v)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad:
        tensor = tensor.detach()
    tensor = tensor.cpu().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone()
    return tensor


def _check(kv: ChunkKV) -> None:
    ids = kv.token_ids
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int32 or ids.ndim != 1 or not len(ids):
        raise InputError("a chunk KV needs token ids as an int32 array with at least one id; make it with as_token_ids")
    if not kv.k or len(kv.k) != len(kv.v):
        raise InputError(f"a chunk KV has K of {len(kv.k)} layers and V of {len(kv.v)}; give both for every layer")
    for name, tensors in (("K", kv.k), ("V", kv.v)):
        for index, tensor in enumerate(tensors):
            if tensor.ndim != 3 or tensor.shape[0] != len(ids):
                raise InputError(
                    f"{name} of layer {index} has shape {tuple(tensor.shape)}; "
                    f"[tokens, kv_heads, head_dim] with {len(ids)} tokens is allowed"
                )
            if str(tensor.dtype) != f"torch.{kv.recipe.dtype}":
                raise InputError(
                    f"{name} of layer {index} is {tensor.dtype}, the recipe says {kv.recipe.dtype!r}; make them agree"
                )
    CODECS.get(kv.recipe.codec)
