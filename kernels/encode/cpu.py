"""Vectors in C++, each read once: ``csrc/cpu/encode.cpp``."""

from __future__ import annotations

import torch

from blendkv.kernels import codes, native
from blendkv.kernels.types import BITS, Codec, Encoded


def refuses(x: torch.Tensor, codec: Codec, signs: torch.Tensor | None) -> str | None:
    """Why it cannot take the arguments: float64, or very wide heads."""
    if x.dtype not in native.DTYPES:
        return f"it reads {', '.join(map(str, native.DTYPES))}, x is {x.dtype}"
    if codec in BITS and x.shape[2] > native.MOST_CODED:
        return f"it encodes head dims up to {native.MOST_CODED}, this is {x.shape[2]}"
    return None


def run(x: torch.Tensor, codec: Codec, signs: torch.Tensor | None) -> Encoded:
    """See `blendkv.kernels.encode_vectors`."""
    tokens, heads, dim = x.shape
    source = native.last_contiguous(x)
    book = None
    if signs is None:
        stored, width, blocks = torch.float8_e4m3fn if codec == "fp8" else torch.int8, dim, 1
    else:
        stored, width, blocks = torch.uint8, dim * BITS[codec] // 8, dim // codes.block_of(dim)
        signs, book = signs.contiguous(), codes.codebook(BITS[codec])
    data = torch.empty(tokens, heads, width, dtype=stored)
    scale = torch.empty(tokens, heads, blocks, dtype=torch.float32)
    native.function("encode")(
        native.ENCODE(
            source.data_ptr(), *source.stride()[:2], native.DTYPES[source.dtype], native.CODECS[codec],
            data.data_ptr(), scale.data_ptr(), *(0 if t is None else t.data_ptr() for t in (signs, book)),
            tokens, heads, dim, torch.get_num_threads(),
        )
    )  # fmt: skip
    return Encoded(codec, data, scale, dim, signs, book)
