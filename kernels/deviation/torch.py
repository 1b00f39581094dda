"""How far fresh K and V are from stored ones (CacheBlend, arXiv 2405.16444, section 4)."""

from __future__ import annotations

import torch


def kv_deviation(
    k_a: torch.Tensor,
    k_b: torch.Tensor,
    v_a: torch.Tensor,
    v_b: torch.Tensor,
    *,
    use_k: bool = True,
    use_v: bool = True,
) -> torch.Tensor:
    """Squared difference per token, summed over heads and dims of K, of V, or of both.

    All four have shape ``[tokens, kv_heads, head_dim]`` (V may have its own head dim).

    Returns
    -------
    torch.Tensor
        ``[tokens]`` float32.
    """
    total = torch.zeros(k_a.shape[0], dtype=torch.float32, device=k_a.device)
    for wanted, a, b in ((use_k, k_a, k_b), (use_v, v_a, v_b)):
        if wanted:
            total += (a.float() - b.float()).square().sum((-1, -2))
    return total
