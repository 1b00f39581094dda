"""Codecs by name: how one layer's K and V become the tensors of a chunk file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from blendkv.registry import Registry
from blendkv.store.base import Layer


class Codec(Protocol):
    """Turns one layer into named tensors and back. A recipe names its codec, so the name is part of the chunk key.

    A file holds part ``p`` of layer ``l`` as tensor ``p.l``; ``parts`` lists the names of all parts.
    """

    parts: tuple[str, ...]

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        """Encode K and V, each ``[tokens, kv_heads, head_dim]``, into one tensor per part."""

    def decode(self, parts: Mapping[str, torch.Tensor]) -> Layer:
        """Return K and V, each ``[tokens, kv_heads, head_dim]``, from the tensors of ``encode``."""


CODECS: Registry[Codec] = Registry("codec")


class RawCodec:
    """K and V as they are, bit for bit."""

    parts: tuple[str, ...] = ("k", "v")

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name the two tensors."""
        return {"k": k, "v": v}

    def decode(self, parts: Mapping[str, torch.Tensor]) -> Layer:
        """Return the two tensors."""
        return parts["k"], parts["v"]


CODECS.add("raw")(RawCodec())
