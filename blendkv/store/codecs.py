"""Codecs by name: how one layer's K and V become the tensors of a chunk file.

Imports no torch and no kernels before something is encoded or decoded: a process that only moves files needs the
names of the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from blendkv.errors import InputError
from blendkv.registry import Registry
from blendkv.store.timing import CODEC_TIMINGS

if TYPE_CHECKING:
    import torch

    from blendkv.kernels.types import Encoded, Stored
    from blendkv.store.base import Layer

RAW = "raw"
"""The codec that loses nothing: the default, and that of every system prefix, which all chunks are computed behind."""
_FLOAT_BYTES = 4  # of a scale


class Codec(Protocol):
    """Turns one layer into named tensors and back. A recipe names its codec, so the name is part of the chunk key.

    A file holds part ``p`` of layer ``l`` as tensor ``p.l``; ``parts`` lists the names of all parts. What a codec does
    depends on its name alone: a file is decoded without any other setting. It is idempotent: what was decoded and is
    encoded again decodes to the same but for the rounding of its dtype (and, for turbo, one vector in a thousand whose
    code moves by a step), so tiers may hold chunks either way.
    """

    parts: tuple[str, ...]

    def refuses(self, head_dim: int) -> str | None:
        """Why it cannot take heads of so many values; None if it can."""

    def vector_bytes(self, head_dim: int, element_size: int) -> int:
        """Bytes that it makes of one head's K or V of one token, whose values have ``element_size`` bytes each."""

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode K and V, each ``[tokens, kv_heads, head_dim]``, into one tensor per part.

        Raises
        ------
        InputError
            If the head dim of K or V is one that it refuses.
        """

    def encoded(self, parts: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor | Encoded, torch.Tensor | Encoded]:
        """K and V as `blendkv.kernels.rope_shift_scatter` takes them: nothing is computed, the memory is shared."""

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: str) -> Layer:
        """K and V, each ``[tokens, kv_heads, head_dim]``, from the tensors of ``encode``.

        Parameters
        ----------
        parts
            By name; on any device.
        dtype
            Of the recipe, ``bfloat16`` for instance: that of what was encoded, and of what is returned.
        """


CODECS: Registry[Codec] = Registry("codec")


@runtime_checkable
class EncodedReader(Protocol):
    """A `blendkv.store.base.ChunkReader` that can also hand out layers as they are stored."""

    def encoded(self, index: int) -> tuple[Stored, Stored]:
        """K and V of layer ``index``, in the store's memory; otherwise as `blendkv.store.base.ChunkReader.layer`."""


class RawCodec:
    """K and V as they are, bit for bit."""

    parts: tuple[str, ...] = ("k", "v")

    def refuses(self, head_dim: int) -> str | None:
        """It takes all."""
        return None

    def vector_bytes(self, head_dim: int, element_size: int) -> int:
        """The bytes of the values."""
        return head_dim * element_size

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name the two tensors."""
        return {"k": k, "v": v}

    def encoded(self, parts: Mapping[str, torch.Tensor]) -> Layer:
        """Return the two tensors."""
        return parts["k"], parts["v"]

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: str) -> Layer:
        """Return the two tensors, which have the recipe's dtype already."""
        return parts["k"], parts["v"]


class _EncodedCodec:
    """K and V each as codes and scales: parts ``k`` and ``v`` with ``k_scale`` and ``v_scale`` (float32)."""

    parts: tuple[str, ...] = ("k", "k_scale", "v", "v_scale")

    def __init__(self, name: str) -> None:
        self.name = name

    def refuses(self, head_dim: int) -> str | None:
        """It takes all."""
        return None

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Codec.encode`."""
        from blendkv.store import coding

        for tensor in (k, v):
            _demand(self.name, self.refuses(tensor.shape[-1]), tensor.shape[-1])
        with CODEC_TIMINGS.timed(f"{self.name} encode"):
            (k_data, k_scale), (v_data, v_scale) = (coding.encode(t, self.name) for t in (k, v))
        return {"k": k_data, "k_scale": k_scale, "v": v_data, "v_scale": v_scale}

    def encoded(self, parts: Mapping[str, torch.Tensor]) -> tuple[Encoded, Encoded]:
        """See `Codec.encoded`."""
        from blendkv.store import coding

        k, v = (coding.encoded(self.name, parts[part], parts[f"{part}_scale"]) for part in ("k", "v"))
        return k, v

    def decode(self, parts: Mapping[str, torch.Tensor], dtype: str) -> Layer:
        """See `Codec.decode`."""
        from blendkv.store import coding

        with CODEC_TIMINGS.timed(f"{self.name} decode"):
            return coding.decode(*self.encoded(parts), dtype)


class ScaledCodec(_EncodedCodec):
    """One byte per value and one scale per token and head: ``value = data * scale``.

    Codes ``[tokens, kv_heads, head_dim]``, scales ``[tokens, kv_heads, 1]``. ``int8`` rounds to 255 steps between the
    vector's largest magnitude and its negative: no value is off by more than ``max |x| / 254``. ``fp8`` (e4m3) has a
    relative error of 1/16 at most, and an absolute one of ``max |x| / 458752`` near zero.
    """

    def vector_bytes(self, head_dim: int, element_size: int) -> int:
        """A byte per value, and the scale."""
        return head_dim + _FLOAT_BYTES


class TurboCodec(_EncodedCodec):
    """TurboQuant (arXiv 2504.19874), MSE form: ``bits`` per value, and one scale per token, head and block.

    Each vector is turned by random signs and a Hadamard matrix, so that its values look normal, divided by its root
    mean square, and rounded to the Lloyd-Max codebook of the normal distribution: the mean squared error is 0.1175,
    0.0345 and 0.009 of the mean square at 2, 3 and 4 bits. The rotation works on blocks of the largest power of two
    that divides the head dim.

    Codes ``[tokens, kv_heads, head_dim * bits / 8]`` uint8, scales ``[tokens, kv_heads, blocks]``;
    `blendkv.kernels.types.Encoded` says how to read them. The signs are fixed: see `blendkv.store.coding.signs`.
    """

    def __init__(self, bits: int) -> None:
        super().__init__(f"turbo{bits}")
        self.bits = bits

    def refuses(self, head_dim: int) -> str | None:
        """Bytes hold whole groups of 8 values."""
        return f"packs 8 values at a time, the head dim is {head_dim}" if head_dim % 8 or not head_dim else None

    def vector_bytes(self, head_dim: int, element_size: int) -> int:
        """The codes, and a scale per block."""
        return head_dim * self.bits // 8 + head_dim // (head_dim & -head_dim) * _FLOAT_BYTES


CODECS.add(RAW)(RawCodec())
CODECS.add("fp8")(ScaledCodec("fp8"))
CODECS.add("int8")(ScaledCodec("int8"))
CODECS.add("turbo4")(TurboCodec(4))
CODECS.add("turbo3")(TurboCodec(3))
CODECS.add("turbo2")(TurboCodec(2))


def check_codec(name: str, head_dims: Iterable[int]) -> Codec:
    """Return a codec that is to be used for heads of these dims.

    Raises
    ------
    InputError
        If there is no codec of that name, or it cannot take one of the dims.
    """
    codec = CODECS.get(name)
    for head_dim in head_dims:
        _demand(name, codec.refuses(head_dim), head_dim)
    return codec


def _demand(name: str, why: str | None, head_dim: int) -> None:
    if why is not None:
        able = [other for other in CODECS.names() if CODECS.get(other).refuses(head_dim) is None]
        raise InputError(f"codec {name} {why}; use {', '.join(able)}")
