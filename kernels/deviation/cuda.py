"""kv_deviation on NVIDIA GPUs by csrc/cuda/deviation.cu: a warp per token, 16 bytes per load."""

from __future__ import annotations

from struct import Struct

import torch

from blendkv.kernels import cuda_call

_PACK = Struct("@5q5q8q2q").pack
"""``DeviationArgs`` of csrc/cuda/deviation.cu."""


def refuses(
    k_a: torch.Tensor, k_b: torch.Tensor, v_a: torch.Tensor, v_b: torch.Tensor, *, use_k: bool, use_v: bool
) -> str | None:
    """Why the kernel cannot take these arguments; None if it can."""
    if k_a.dtype not in cuda_call.CODES:
        return f"it reads {', '.join(map(str, cuda_call.CODES))}, not {k_a.dtype}"
    return cuda_call.refuses_device(k_a.device)


def run(
    k_a: torch.Tensor, k_b: torch.Tensor, v_a: torch.Tensor, v_b: torch.Tensor, *, use_k: bool, use_v: bool
) -> torch.Tensor:
    """See `blendkv.kernels.kv_deviation`."""
    out = k_a.new_empty(k_a.shape[0], dtype=torch.float32)
    if k_a.shape[0] == 0:
        return out
    tensors = [t if t.stride(-1) == 1 else t.contiguous() for t in (k_a, k_b, v_a, v_b)]
    whole = all(t.shape[-1] % 8 == 0 and cuda_call.in_chunks(t) for t in tensors)
    args = _PACK(
        *map(cuda_call.address, (*tensors, out)),
        k_a.shape[0], k_a.shape[1] if use_k else 0, k_a.shape[2], v_a.shape[2], v_a.shape[1] if use_v else 0,
        *(t.stride(dim) for t in tensors for dim in (0, 1)),
        cuda_call.CODES[k_a.dtype], whole,
    )  # fmt: skip
    cuda_call.launch("deviation", args, k_a.device)
    return out
