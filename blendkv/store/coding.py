"""The codecs' work on tensors: K or V of one layer to codes and scales, and back through the kernels.

`blendkv.kernels.codes` has the arithmetic in its plainest form. For the turbo codecs `encode` does the same tile by
tile, with the vectors in columns: butterflies, comparisons and packing then run over whole rows of memory.
"""

from __future__ import annotations

import hashlib
from functools import cache
from itertools import pairwise

import numpy as np
import torch

from blendkv.kernels import codes, rope_shift_scatter
from blendkv.kernels.types import BITS, Codec, Encoded
from blendkv.store.base import Layer
from blendkv.store.codecs import CODECS, RAW
from blendkv.types import ChunkKV

_TILE = 1 << 18
"""Values that are encoded at once; less, and the time goes into calls, more, and it goes into memory."""
_SAFE = (1e-15, 1e15)
"""Magnitudes whose squares float32 holds, with room for a sum of them."""
_NAMES: dict[str, Codec] = {"fp8": "fp8", "int8": "int8", "turbo4": "turbo4", "turbo3": "turbo3", "turbo2": "turbo2"}
_TINY = torch.finfo(torch.float32).tiny


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
    out: list[torch.Tensor] = []
    for source in (k, v):
        tokens, heads = source.data.shape[:2]
        wanted: torch.dtype = getattr(torch, dtype)
        out.append(torch.empty(tokens, heads, source.dim, dtype=wanted, device=source.data.device))
    rope_shift_scatter(k, v, None, out[0], out[1], 0)
    return out[0], out[1]


def encode(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of K or V ``[tokens, heads, dim]`` by the codec ``name``, where it lies."""
    dim = x.shape[-1]
    rows = x.reshape(-1, 1, dim)
    step = max(1, _TILE // max(1, dim))
    parts = [_encode_tile(rows[first : first + step], name) for first in range(0, len(rows), step)]
    data, scale = (torch.cat(kind) if len(parts) > 1 else kind[0] for kind in zip(*parts, strict=True))
    return data.view(*x.shape[:-1], -1), scale.reshape(-1).view(*x.shape[:-1], -1)


def _encode_tile(rows: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    if name not in BITS:
        found = codes.encode(rows, _NAMES[name])
        return found.data, found.scale
    block = codes.block_of(rows.shape[-1])
    normal, norm = _turned(rows.flatten(0, 1), block)
    index, fit = _quantised(normal, BITS[name], block)
    return _packed(index, BITS[name]), (norm * fit).t()


def _turned(rows: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate vectors ``[n, dim]`` and divide each block by its root mean square.

    Returns what then looks normal, ``[dim, n]``, and the factors ``[dim / block, n]`` that undo the division and make
    the rotation orthonormal, both float32.
    """
    count, dim = rows.shape
    x = torch.empty(dim, count, device=rows.device).copy_(rows.float().t())  # never the caller's memory
    # Squares of very large or very small values leave float32's range; those vectors are scaled to 1 first.
    top = x.abs().amax(0)
    odd = (top > _SAFE[1]) | ((top < _SAFE[0]) & (top > 0))
    unit = torch.where(odd, top, torch.ones_like(top))
    if bool(odd.any()):
        x /= unit
    x *= signs(dim).to(x.device)[:, None]
    spare, step = torch.empty_like(x), 1
    while step < block:  # butterflies of the Hadamard matrix in Sylvester's order
        a, b = x.view(-1, 2, step, count).unbind(1)
        sums, differences = spare.view(-1, 2, step, count).unbind(1)
        torch.add(a, b, out=sums)
        torch.sub(a, b, out=differences)
        x, spare, step = spare, x, 2 * step
    blocks = x.view(-1, block, count)
    norm = torch.mul(x, x, out=spare).view(-1, block, count).sum(1).div_(block).sqrt_()
    blocks *= norm.clamp(min=_TINY).reciprocal()[:, None]
    return x, norm * (unit * block**-0.5)


def _quantised(normal: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the nearest centroid, uint8, and per block and vector the factor with which the centroids fit best.

    The factor (least squares, near 1) lowers the error by some 3 % and makes the codec idempotent: without it, the
    centroids have less energy than what they stand for, and every coding of a decoded vector would shrink it again.
    """
    half = 1 << (bits - 1)
    upper = _codebook(bits)[half:].tolist()  # the codebook is symmetric: magnitudes are compared with half of it
    magnitude = normal.abs()
    centroid, place = torch.full_like(normal, upper[0]), torch.full_like(normal, 0.5)
    above = torch.empty_like(normal)  # float, not bool: comparisons and sums then run several times as fast
    for low, high in pairwise(upper):
        torch.gt(magnitude, (low + high) / 2, out=above)
        centroid.add_(above, alpha=high - low)
        place += above
    blocks = centroid.view(-1, block, normal.shape[1])
    fit = torch.linalg.vecdot(blocks, magnitude.view_as(blocks), dim=1) / torch.linalg.vecdot(blocks, blocks, dim=1)
    return place.copysign_(normal).add_(half - 0.5).to(torch.uint8), fit


def _packed(index: torch.Tensor, bits: int) -> torch.Tensor:
    """Indices ``[dim, n]`` as little-endian bit strings ``[n, dim * bits / 8]``: 8 of them fill ``bits`` bytes."""
    groups = index.view(-1, 8, index.shape[1])
    octets = torch.zeros(len(groups), bits, index.shape[1], dtype=torch.uint8, device=index.device)
    for byte in range(bits):
        for place in range(8):
            shift = bits * place - 8 * byte
            if -bits < shift < 8:
                octets[:, byte] |= groups[:, place] << shift if shift >= 0 else groups[:, place] >> -shift
    return octets.view(-1, index.shape[1]).t().contiguous()
