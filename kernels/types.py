"""What the ops are given beside tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from blendkv.kernels.rotation import RopeTable

Statistic = Literal["max", "mean"]
Codec = Literal["raw", "fp8", "int8", "turbo4", "turbo3", "turbo2"]
BITS: dict[str, int] = {"turbo4": 4, "turbo3": 3, "turbo2": 2}
"""Bits per value of the codecs that store a codebook's index."""


@dataclass(frozen=True)
class AttentionParams:
    """What a layer's attention does besides softmax(q k) v.

    ``scale`` multiplies the scores; ``window`` is a sliding window in tokens, the query's own included; ``softcap``
    bounds the scores by tanh (Gemma-2); ``sinks`` are ``[q_heads]`` logits that join the denominator (gpt-oss).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class Trend:
    """A shift that changes along a chunk: token t's is ``constant + along[t] * slope``.

    ``constant`` and ``slope`` are ``[kv_heads, head_dim]`` and ``along`` is ``[tokens]``, all float32. Written out for
    every token it would be twice the bytes of the K or V in 16 bits that it is added to.
    """

    constant: torch.Tensor
    slope: torch.Tensor
    along: torch.Tensor

    def per_token(self) -> torch.Tensor:
        """The shift written out, ``[tokens, kv_heads, head_dim]``."""
        return torch.addcmul(self.constant, self.along[:, None, None], self.slope)


@dataclass(frozen=True)
class Paged:
    """Keys and values that lie in blocks, as an engine's KV cache holds them.

    ``k`` and ``v`` are ``[blocks, block_size, kv_heads, head_dim]`` of any strides; ``table`` (``[n]`` int32 or int64)
    names the blocks of a request in order, and ``tokens`` of their places are in use: position p lies in block
    ``table[p // block_size]`` at ``p % block_size``.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    tokens: int


@dataclass(frozen=True)
class AttentionOutput:
    """What `selected_attention` returns; the optional parts are None unless asked for.

    ``out`` is ``[queries, q_heads, v_head_dim]`` in the queries' dtype; ``lse`` ``[queries, q_heads]`` float32, the
    natural logarithm of the softmax's denominator (sinks included); ``deviation`` ``[keys]`` float32.
    """

    out: torch.Tensor
    lse: torch.Tensor | None = None
    deviation: torch.Tensor | None = None


@dataclass(frozen=True)
class Encoded:
    """K or V of a chunk as a codec stores it, for `rope_shift_scatter` to decode on its way.

    ``tokens x heads`` vectors of ``dim`` values, by codec:

    - ``fp8``: ``data`` ``[tokens, heads, dim]`` float8_e4m3fn; value = data * scale.
    - ``int8``: ``data`` int8; value = data * scale.
    - ``turbo4``, ``turbo3``, ``turbo2`` (TurboQuant, arXiv 2504.19874): ``data`` uint8
      ``[tokens, heads, dim * bits / 8]``, indices of ``bits`` bits, little-endian, the first value in the lowest bits.
      With y = ``codebook``[index], the value is scale * signs * H y per block of the rotation, H the orthonormal
      Hadamard matrix of the largest power of two that divides ``dim``.

    ``scale`` is float32 ``[tokens, heads, blocks]``; blocks is 1 for fp8 and int8. ``signs`` is ``[dim]`` float32 of
    +1 and -1, ``codebook`` ``[2^bits]`` float32; both are None where the codec has none.
    """

    codec: Codec
    data: torch.Tensor
    scale: torch.Tensor
    dim: int
    signs: torch.Tensor | None = None
    codebook: torch.Tensor | None = None

    def __getitem__(self, tokens: torch.Tensor | slice) -> Encoded:
        """Some of the tokens."""
        return replace(self, data=self.data[tokens], scale=self.scale[tokens])


Stored = torch.Tensor | Encoded
"""K or V ``[tokens, heads, dim]`` as values, or as a codec stores them."""


class Move(NamedTuple):
    """A chunk on its way into a layer's K and V: the arguments of `rope_shift_scatter` beside the outputs."""

    k: torch.Tensor | Encoded
    v: torch.Tensor | Encoded
    table: RopeTable | None
    slots: torch.Tensor | int
    k_bias: torch.Tensor | Trend | None = None
    v_bias: torch.Tensor | Trend | None = None
