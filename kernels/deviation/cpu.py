"""One read of all four tensors in C++: ``csrc/cpu/deviation.cpp``."""

from __future__ import annotations

import torch

from blendkv.kernels import native


def refuses(
    k_a: torch.Tensor, k_b: torch.Tensor, v_a: torch.Tensor, v_b: torch.Tensor, *, use_k: bool, use_v: bool
) -> str | None:
    """Why it cannot take the arguments: float64."""
    return None if k_a.dtype in native.DTYPES else f"it computes in float32, k_a is {k_a.dtype}"


def run(
    k_a: torch.Tensor, k_b: torch.Tensor, v_a: torch.Tensor, v_b: torch.Tensor, *, use_k: bool, use_v: bool
) -> torch.Tensor:
    """See `blendkv.kernels.kv_deviation`."""
    tokens = k_a.shape[0]
    k_a, k_b, v_a, v_b = (native.last_contiguous(t) for t in (k_a, k_b, v_a, v_b))
    deviation = k_a.new_empty(tokens, dtype=torch.float32)
    sides = []
    for wanted, pair in ((use_k, (k_a, k_b)), (use_v, (v_a, v_b))):
        for side in pair:
            sides += [side.data_ptr() if wanted else 0, *side.stride()[:2]]
    packed = native.DEVIATION(
        *sides, deviation.data_ptr(), tokens, k_a.shape[1], v_a.shape[1], k_a.shape[2], v_a.shape[2],
        native.DTYPES[k_a.dtype], torch.get_num_threads(),
    )  # fmt: skip
    native.function("deviation")(packed)
    return deviation
