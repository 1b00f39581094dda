"""The codecs' arithmetic: K or V as `Encoded`, and back. Float32; the reference of what backends decode on their way.

TurboQuant (arXiv 2504.19874), MSE form: each vector is divided by its norm, turned by random signs and a Hadamard
matrix so that its values look normal, and every value is rounded to the Lloyd-Max codebook of the normal distribution.
"""

from __future__ import annotations

from functools import cache

import torch

from blendkv.errors import InputError
from blendkv.kernels.types import BITS, Codec, Encoded

_HALF: dict[int, tuple[float, ...]] = {
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}
"""Positive half of the Lloyd-Max codebook of N(0, 1) (Max 1960, table I), by bits."""


def block_of(dim: int) -> int:
    """Width of the Hadamard matrix: the largest power of two that divides the head dim."""
    return dim & -dim


def codebook(bits: int) -> torch.Tensor:
    """Centroids ``[2^bits]`` float32 of a standard normal value, ascending."""
    half = torch.tensor(_HALF[bits])
    return torch.cat((-half.flip(0), half))


@cache
def _signs(dim: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (dim,), generator=generator).float() * 2 - 1


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Multiply the last dim, a power of two, by the orthonormal Hadamard matrix (Sylvester's order)."""
    width = x.shape[-1]
    step = 1
    while step < width:
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        step *= 2
    return x * width**-0.5


def _pack(index: torch.Tensor, bits: int) -> torch.Tensor:
    """Indices ``[..., dim]`` as a little-endian bit string, ``[..., dim * bits / 8]`` uint8."""
    single = (index.unsqueeze(-1) >> torch.arange(bits, device=index.device)) & 1
    octets = single.flatten(-2).unflatten(-1, (-1, 8))
    return (octets << torch.arange(8, device=index.device)).sum(-1).to(torch.uint8)


def unpack(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo the packing: int64 ``[..., dim]``."""
    single = (data.unsqueeze(-1).long() >> torch.arange(8, device=data.device)) & 1
    groups = single.flatten(-2).unflatten(-1, (-1, bits))
    return (groups << torch.arange(bits, device=data.device)).sum(-1)


def encode(x: torch.Tensor, codec: Codec, seed: int = 0) -> Encoded:
    """Encode K or V ``[tokens, heads, dim]``.

    Parameters
    ----------
    x
        Any float dtype; finite.
    codec
        ``fp8``, ``int8``, ``turbo4``, ``turbo3`` or ``turbo2``; ``dim`` must be a multiple of 8 for the last three.
    seed
        Of the random signs.

    Raises
    ------
    InputError
        If the codec is another one, or does not take this head dim.
    """
    wide, dim = x.float(), x.shape[-1]
    if codec in ("fp8", "int8"):
        top = 448.0 if codec == "fp8" else 127.0
        scale = wide.abs().amax(-1, keepdim=True) / top
        scaled = wide / scale.clamp(min=torch.finfo(torch.float32).tiny)
        data = scaled.to(torch.float8_e4m3fn) if codec == "fp8" else scaled.round().clamp(-127, 127).to(torch.int8)
        return Encoded(codec, data, scale, dim)
    if codec not in BITS:
        raise InputError(f"codec {codec!r} encodes nothing; allowed: fp8, int8, {', '.join(BITS)}")
    if dim % 8:
        raise InputError(f"{codec} packs 8 values at a time, the head dim is {dim}; use int8 or fp8")
    block, bits, signs = block_of(dim), BITS[codec], _signs(dim, seed).to(x.device)
    turned = hadamard((wide * signs).unflatten(-1, (-1, block)))
    scale = turned.norm(dim=-1) * block**-0.5
    normal = turned / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    book = codebook(bits).to(x.device)
    index = torch.bucketize(normal, (book[1:] + book[:-1]) / 2).flatten(-2)
    return Encoded(codec, _pack(index, bits), scale, dim, signs, book)


def decode(source: torch.Tensor | Encoded) -> torch.Tensor:
    """K or V ``[tokens, heads, dim]`` float32 (a plain tensor as it is, in its own dtype)."""
    if isinstance(source, torch.Tensor):
        return source
    if source.codec in ("fp8", "int8"):
        return source.data.float() * source.scale
    assert source.codebook is not None
    assert source.signs is not None
    normal = source.codebook[unpack(source.data, BITS[source.codec])]
    blocks = normal.unflatten(-1, (-1, block_of(source.dim))) * source.scale.unsqueeze(-1)
    return hadamard(blocks).flatten(-2) * source.signs
