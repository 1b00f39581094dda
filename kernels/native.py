"""The compiled CPU library's functions: every op takes one packed struct of addresses, strides and sizes.

Packing a struct costs a third of what ctypes takes to convert forty arguments; the layouts are those of
``csrc/cpu/args.h``, where every field is an int64 or, at the end, a double.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from struct import Struct

import torch

from blendkv.kernels import build
from blendkv.kernels.types import BITS, Paged

ATTENTION = Struct("@7q8q3q7q9q2d").pack
MASS = Struct("@8q4q3q8q2d").pack
SCATTER = Struct("@17q17q7q7q").pack
DEVIATION = Struct("@20q").pack
ENCODE = Struct("@13q").pack
DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOST_DIM = 256
"""Largest head dim of the attention kernels."""
CODECS = {"fp8": 1, "int8": 2, **{name: 8 + bits for name, bits in BITS.items()}}
MOST_CODED = 1024
"""Largest head dim of turbo codes."""


@cache
def function(op: str) -> Callable[[bytes], None]:
    """The library's function for an op."""
    return build.library("cpu")[f"blendkv_cpu_{op}"]


def last_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where its last dim is strided."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] < 2 else tensor.contiguous()


def cache_of(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """Address and strides of ``[tokens, heads, dim]`` or ``[blocks, block_size, heads, dim]``."""
    strides = tensor.stride()
    if len(strides) == 3:
        return tensor.data_ptr(), 0, strides[0], strides[1]
    return tensor.data_ptr(), strides[0], strides[1], strides[2]


def paging_of(keys: torch.Tensor | Paged) -> tuple[torch.Tensor | None, tuple[int, int, int]]:
    """A block table that the kernel can read, which must outlive the call, and what to tell it; None for a tensor."""
    if not isinstance(keys, Paged):
        return None, (0, 0, 0)
    table = keys.table.contiguous()
    return table, (table.data_ptr(), table.element_size(), keys.k.shape[1])


def refuses_scores(q: torch.Tensor, head_dim: int, scale: float, sign: str = "params.scale") -> str | None:
    """Why the kernels that compute scores cannot: shared by attention and mass."""
    if q.dtype not in DTYPES:
        return f"it computes in float32, q is {q.dtype}"
    if head_dim > MOST_DIM:
        return f"it takes head dims up to {MOST_DIM}, this is {head_dim}"
    if not scale > 0:
        return f"it takes a positive {sign}, this is {scale}"
    return None
