"""What the Triton kernels share: reading rows of K and V, a product, the soft-cap, and what no kernel takes.

Only the modules ``kernels/<op>/triton.py`` import this one, since it needs Triton. The annotation of a kernel's
argument says only whether it is known when the kernel is compiled (``tl.constexpr``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton
import triton.language as tl

from blendkv.kernels.backends import interpreting
from blendkv.kernels.types import AttentionParams, Paged

WIDEST = 256
"""Largest head dim of the attention kernels: wider tiles do not fit the shared memory of all GPUs."""
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
"""Kernels take powers and logarithms of two, which GPUs compute at once."""
NO_WINDOW = 1 << 30
"""A window from here on hides nothing: keys and positions below it are kept as 32-bit integers."""


def wide_products() -> bool:
    """Whether products must be computed in float32: Triton's interpreter multiplies the bits of bfloat16 numbers."""
    return interpreting()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on a tensor's GPU, which need not be the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def cores(device: torch.device) -> int:
    """How many programs run side by side at least: the GPU's multiprocessors; one program in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _too_old(device: torch.device) -> str | None:
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"a GPU of compute capability {major}.{minor}; Triton's kernels need 8.0"
    return None


def unusable(computed: list[torch.Tensor], others: list[torch.Tensor | None]) -> str | None:
    """Why Triton cannot take an op's tensors: those it computes with, and those it reads beside them."""
    device = computed[0].device
    if device.type == "cpu" and not interpreting():
        return "tensors on the CPU"
    if any(t.dtype == torch.float64 for t in computed):
        return "float64; Triton's kernels compute in float32"
    for tensor in (*computed, *others):
        if tensor is not None and tensor.device != device:
            return f"tensors on both {device} and {tensor.device}"
    return _too_old(device)


def too_wide(*dims: int) -> str | None:
    """Why the attention kernels cannot take these head dims."""
    return f"a head dim of {max(dims)}; Triton's kernels go up to {WIDEST}" if max(dims) > WIDEST else None


def padded(dim: int, least: int = 16) -> int:
    """Columns of a tile that holds a head's dims: a power of two that a matrix product takes."""
    return max(least, triton.next_power_of_2(dim))


def window_of(params: AttentionParams) -> int:
    """The window in tokens, 0 where nothing is hidden."""
    return 0 if params.window is None or params.window >= NO_WINDOW else params.window


def placed(k: torch.Tensor | Paged, part: str = "k") -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, ...], int]:
    """K or V as kernels read it: tensor, block table, strides of (block, token, head, dim), tokens per block.

    A contiguous tensor has no table, and 0 tokens per block.
    """
    if isinstance(k, Paged):
        cache_ = k.k if part == "k" else k.v
        return cache_, k.table, cache_.stride(), cache_.shape[1]
    return k, None, (0, *k.stride()), 0


@triton.jit
def row_offsets(key: tl.tensor, live: tl.tensor, table: tl.tensor, strides: tl.tuple, PAGE: tl.constexpr) -> tl.tensor:
    """Where the keys' rows begin, in elements (64 bits: a cache can be larger than 2^31 of them)."""
    if PAGE == 0:
        return key.to(tl.int64) * strides[1]
    else:
        block = tl.load(table + key // PAGE, mask=live, other=0).to(tl.int64)
        return block * strides[0] + (key % PAGE).to(tl.int64) * strides[1]


@triton.jit
def read_rows(
    base: tl.tensor,
    offsets: tl.tensor,
    live: tl.tensor,
    stride: tl.tensor,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Rows of ``DIM`` values as a tile of ``BLOCK`` columns, zeros where there is nothing to read."""
    column = tl.arange(0, BLOCK)
    at = base + offsets[:, None] + (column * stride)[None, :]
    if DIM == BLOCK:
        if MASKED:
            return tl.load(at, mask=live[:, None], other=0.0)
        else:
            return tl.load(at)
    elif MASKED:
        return tl.load(at, mask=live[:, None] & (column < DIM)[None, :], other=0.0)
    else:
        return tl.load(at, mask=(column < DIM)[None, :], other=0.0)


@triton.jit
def product(a: tl.tensor, b: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """``a @ b``, accumulated in float32; float32 operands keep all their bits."""
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """The hyperbolic tangent to float32's precision, which neither GPU's fast instruction has.

    Near zero, where the quotient cancels, it is the series up to x^9.
    """
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = x * (1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far))


@triton.jit
def capped(found: tl.tensor, inner: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Products of q and k, soft-capped to -1 .. 1 where there is a cap; times `factors`' second number, the scores."""
    if SOFTCAP:
        return tanh(found * inner)
    else:
        return found


def factors(params: AttentionParams) -> tuple[float, float]:
    """What multiplies products of q and k inside the soft-cap, and what makes scores of `capped`'s result.

    The second is applied to the difference from the largest one, which is exact for large scores.
    """
    return (0.0, params.scale) if params.softcap is None else (params.scale / params.softcap, params.softcap)


def unscaled(params: AttentionParams) -> str | None:
    """Why the attention kernels cannot take a scale: they need the order of the scores before they multiply."""
    return None if params.scale > 0 else f"a scale of {params.scale}; Triton's kernels take positive ones"
