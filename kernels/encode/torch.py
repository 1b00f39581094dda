"""Plain torch, tile by tile; for the turbo codecs with the vectors in columns.

Butterflies, comparisons, sums and packing then run over whole rows of memory.
"""

from __future__ import annotations

import torch

from blendkv.kernels import codes
from blendkv.kernels.types import BITS, Codec, Encoded

TILE = 1 << 18
"""Values that are encoded at once; less, and the time goes into calls, more, and it goes into memory."""


def refuses(*args: object, **kwargs: object) -> str | None:
    """Nothing."""
    return None


def run(x: torch.Tensor, codec: Codec, signs: torch.Tensor | None) -> Encoded:
    """See `blendkv.kernels.encode_vectors`."""
    tokens, heads, dim = x.shape
    step = max(1, TILE // max(1, heads * dim))
    tiles = [x[first : first + step] for first in range(0, max(1, tokens), step)]
    if signs is None or not tokens * heads:
        parts = [codes.encode(tile, codec, signs) for tile in tiles]
        data, scale = torch.cat([p.data for p in parts]), torch.cat([p.scale for p in parts])
        return Encoded(codec, data, scale, dim, signs, parts[0].codebook)
    packed, scales = zip(*(_turbo(tile, signs, BITS[codec]) for tile in tiles), strict=True)
    book = codes.codebook(BITS[codec]).to(x.device)
    return Encoded(codec, torch.cat(packed), torch.cat(scales), dim, signs, book)


def _turbo(tile: torch.Tensor, signs: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, dim = tile.shape
    block = codes.block_of(dim)
    normal, norm, finite = _turned(tile.reshape(-1, dim), signs, block)
    index, fit = _quantised(normal, bits, block)
    scale = norm.mul_(fit)
    if finite is not None:
        index *= finite
        scale.masked_fill_(~finite, torch.nan)
    return _packed(index, bits).view(tokens, heads, -1), scale.t().reshape(tokens, heads, -1)


def _turned(
    rows: torch.Tensor, signs: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rotate vectors ``[n, dim]`` and divide each block by its root mean square.

    Returns what then looks normal, ``[dim, n]``, the factors ``[dim / block, n]`` that undo the division and make the
    rotation orthonormal, both float32, and which vectors are finite, ``[n]``, None if all are.
    """
    count, dim = rows.shape
    x = torch.empty(dim, count, device=rows.device).copy_(rows.t())  # never the caller's memory
    top = x.abs().amax(0)
    finite = top.isfinite()
    broken = not bool(finite.all())
    if broken:
        x.masked_fill_(~finite, 0.0)
        top.masked_fill_(~finite, 0.0)
    unit = codes.unit_of(top)
    if bool((unit != 1.0).any()):
        x /= unit
    x *= signs[:, None]
    spare, step = torch.empty_like(x), 1
    while step < block:  # butterflies of the Hadamard matrix in Sylvester's order
        a, b = x.view(-1, 2, step, count).unbind(1)
        sums, differences = spare.view(-1, 2, step, count).unbind(1)
        torch.add(a, b, out=sums)
        torch.sub(a, b, out=differences)
        x, spare, step = spare, x, 2 * step
    blocks = x.view(-1, block, count)
    norm = codes.root(codes.total(torch.mul(x, x, out=spare).view_as(blocks), 1).div_(block))
    blocks *= norm.clamp(min=codes.TINY).reciprocal()[:, None]
    return x, norm * (unit * block**-0.5), finite if broken else None


def _quantised(normal: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the nearest centroid, uint8, and per block and vector the factor with which the centroids fit best."""
    upper, bounds = codes.half_codebook(bits)
    half = len(upper)
    magnitude = normal.abs()
    centroid, place = torch.full_like(normal, upper[0]), torch.full_like(normal, 0.5)
    for bound, value in zip(bounds, upper[1:], strict=True):
        above = magnitude > bound
        centroid.masked_fill_(above, value)
        place += above
    magnitude *= centroid
    fit = codes.total(magnitude.view(-1, block, normal.shape[1]), 1)
    fit /= codes.total(centroid.mul_(centroid).view(-1, block, normal.shape[1]), 1)
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
