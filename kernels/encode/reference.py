"""The arithmetic written out: `blendkv.kernels.codes.encode`."""

from __future__ import annotations

import torch

from blendkv.kernels import codes
from blendkv.kernels.types import Codec, Encoded


def refuses(*args: object, **kwargs: object) -> str | None:
    """Nothing."""
    return None


def run(x: torch.Tensor, codec: Codec, signs: torch.Tensor | None) -> Encoded:
    """See `blendkv.kernels.encode_vectors`."""
    return codes.encode(x, codec, signs)
