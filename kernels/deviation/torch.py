"""The sum itself, in plain torch."""

from __future__ import annotations

import torch


def refuses(*args: object, **kwargs: object) -> str | None:
    """Nothing."""
    return None


def run(
    k_a: torch.Tensor, k_b: torch.Tensor, v_a: torch.Tensor, v_b: torch.Tensor, *, use_k: bool, use_v: bool
) -> torch.Tensor:
    """See `blendkv.kernels.kv_deviation`."""
    wide = torch.float64 if k_a.dtype == torch.float64 else torch.float32
    total = torch.zeros(k_a.shape[0], dtype=wide, device=k_a.device)
    for wanted, a, b in ((use_k, k_a, k_b), (use_v, v_a, v_b)):
        if wanted:
            total += (a.to(wide) - b.to(wide)).square().sum((-1, -2))
    return total
