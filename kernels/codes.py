"""The codecs' arithmetic: K or V as `Encoded`, and back. Float32; the reference of what backends encode and decode.

TurboQuant (arXiv 2504.19874), MSE form: each vector is turned by random signs and a Hadamard matrix so that its values
look normal, divided by its root mean square, and every value is rounded to the Lloyd-Max codebook of the normal
distribution.

Every step of encoding is one that IEEE 754 rounds in one way, and sums run in one order (`total`), so that all backends
make the same bytes.
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
SAFE = (1e-15, 1e15)
"""Magnitudes whose squares float32 holds, with room for a sum of them."""
TINY = torch.finfo(torch.float32).tiny


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


def butterflies(x: torch.Tensor) -> torch.Tensor:
    """Multiply the last dim, a power of two, by the Hadamard matrix of +1 and -1 (Sylvester's order)."""
    step = 1
    while step < x.shape[-1]:
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        step *= 2
    return x


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Multiply the last dim, a power of two, by the orthonormal Hadamard matrix."""
    return butterflies(x) * x.shape[-1] ** -0.5


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


def total(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sum over a dim whose size is a power of two: the upper half is added to the lower until one is left.

    An order that vectors of any number of lanes can keep, wherever the dim is a multiple of them.
    """
    while x.shape[dim] > 1:
        lower, upper = x.chunk(2, dim)
        x = lower + upper
    return x.squeeze(dim)


def root(x: torch.Tensor) -> torch.Tensor:
    """Square root as IEEE 754 rounds it; that of float32 in torch may be off by a unit (MKL's vectors)."""
    return x.double().sqrt_().float()


def half_codebook(bits: int) -> tuple[list[float], list[float]]:
    """The codebook's positive centroids, and the bounds between them; the rest is their mirror image."""
    upper = codebook(bits)[1 << (bits - 1) :]
    return upper.tolist(), ((upper[1:] + upper[:-1]) / 2).tolist()


def encode(x: torch.Tensor, codec: Codec, signs: torch.Tensor | None = None) -> Encoded:
    """Encode K or V ``[tokens, heads, dim]``.

    Parameters
    ----------
    x
        Any float dtype. A vector with a value that is not finite gets codes of zero bits and scales of NaN.
    codec
        ``fp8``, ``int8``, ``turbo4``, ``turbo3`` or ``turbo2``; ``dim`` must be a multiple of 8 for the last three.
    signs
        ``[dim]`` float32 of +1 and -1, for turbo; by default random ones, always the same.

    Raises
    ------
    InputError
        If the codec is another one, or does not take this head dim.
    """
    wide, dim = x.float(), x.shape[-1]
    top = wide.abs().amax(-1, keepdim=True)
    finite = top.isfinite()
    wide, top = wide.where(finite, 0.0), top.where(finite, 0.0)
    if codec in ("fp8", "int8"):
        scale = top / (448.0 if codec == "fp8" else 127.0)
        scaled = wide / scale.clamp(min=TINY)
        data = scaled.to(torch.float8_e4m3fn) if codec == "fp8" else scaled.round().clamp(-127, 127).to(torch.int8)
        return Encoded(codec, data, scale.where(finite, torch.nan), dim)
    if codec not in BITS:
        raise InputError(f"codec {codec!r} encodes nothing; allowed: fp8, int8, {', '.join(BITS)}")
    if dim % 8:
        raise InputError(f"{codec} packs 8 values at a time, the head dim is {dim}; use int8 or fp8")
    signs = _signs(dim, 0).to(x.device) if signs is None else signs.to(x.device)
    index, scale = _turbo(wide, top, signs, BITS[codec])
    data, scale = _pack(index.where(finite, 0), BITS[codec]), scale.where(finite, torch.nan)
    return Encoded(codec, data, scale, dim, signs, codebook(BITS[codec]).to(x.device))


def _turbo(wide: torch.Tensor, top: torch.Tensor, signs: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices ``[..., dim]`` and scales ``[..., blocks]``."""
    block, half = block_of(wide.shape[-1]), 1 << (bits - 1)
    unit = unit_of(top)
    turned = butterflies((wide / unit * signs).unflatten(-1, (-1, block)))
    norm = root(total(turned.square()) / block)
    normal = turned * norm.clamp(min=TINY).reciprocal().unsqueeze(-1)
    magnitude = normal.abs()
    upper, bounds = (torch.tensor(each, device=wide.device) for each in half_codebook(bits))
    place = (magnitude.unsqueeze(-1) > bounds).sum(-1)
    centroid = upper[place]
    # The factor (least squares, near 1) lowers the error by some 3 % and makes the codec idempotent: without it, the
    # centroids have less energy than what they stand for, and every coding of a decoded vector would shrink it again.
    fit = total(centroid * magnitude) / total(centroid * centroid)
    scale = norm * (unit * block**-0.5) * fit
    return torch.where(normal.signbit(), half - 1 - place, half + place).flatten(-2), scale


def unit_of(top: torch.Tensor) -> torch.Tensor:
    """What vectors of these largest magnitudes are divided by first: 1, or where squares leave float32's range, it."""
    return top.where((top > SAFE[1]) | ((top < SAFE[0]) & (top > 0)), 1.0)


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
