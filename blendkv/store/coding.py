"""The codecs' work on tensors: K or V of one layer to codes and scales, and back, both through the kernels."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import torch

from blendkv.kernels import codes, decode_vectors, encode_vectors
from blendkv.kernels.types import BITS, Codec, Encoded
from blendkv.store.base import Layer
from blendkv.store.codecs import CODECS, RAW
from blendkv.types import ChunkKV

_NAMES: dict[str, Codec] = {"fp8": "fp8", "int8": "int8", "turbo4": "turbo4", "turbo3": "turbo3", "turbo2": "turbo2"}


@cache
def signs(dim: int) -> torch.Tensor:
    """Signs ``[dim]`` float32 of turbo's rotation: +1 where a bit of SHAKE-128("turboquant") is 0, else -1.

    Bits are taken from the lowest of the first byte on. They are part of the format: a file that was written with
    others cannot be read.
    """
    stream = np.frombuffer(hashlib.shake_128(b"turboquant").digest(-(-dim // 8)), dtype=np.uint8)
    return torch.from_numpy(1 - 2 * np.unpackbits(stream, bitorder="little")[:dim].astype(np.float32))


def encoded(name: str, data: torch.Tensor, scale: torch.Tensor) -> Encoded:
    """Codes and scales with what else decoding needs, on the device of the codes."""
    if name not in BITS:
        return Encoded(_NAMES[name], data, scale, data.shape[-1])
    dim = data.shape[-1] * 8 // BITS[name]
    return Encoded(_NAMES[name], data, scale, dim, *(t.to(data.device) for t in (signs(dim), _codebook(BITS[name]))))


def as_stored(kv: ChunkKV) -> ChunkKV:
    """``kv`` as a store gives it back from disk: equal keys mean equal values, computed a moment ago or read.

    Codecs are idempotent (`blendkv.store.codecs.Codec`), so a store that encodes it changes nothing more.
    """
    if kv.recipe.codec == RAW:
        return kv
    codec = CODECS.get(kv.recipe.codec)
    layers = [codec.decode(codec.encode(*kv.layer(i)), kv.recipe.dtype) for i in range(kv.layers)]
    return ChunkKV(kv.fingerprint, kv.recipe, kv.token_ids, tuple(k for k, _ in layers), tuple(v for _, v in layers))


@cache
def _codebook(bits: int) -> torch.Tensor:
    return codes.codebook(bits)


def decode(k: Encoded, v: Encoded, dtype: str) -> Layer:
    """Decode K and V into new tensors of ``dtype``, where they lie."""
    return decode_vectors(k, v, getattr(torch, dtype))


def encode(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of K or V ``[tokens, heads, dim]`` by the codec ``name``, where it lies."""
    turned = signs(x.shape[-1]).to(x.device) if name in BITS else None
    found = encode_vectors(x, _NAMES[name], turned)
    return found.data, found.scale
