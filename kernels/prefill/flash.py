"""All chunks in one call of flash-attn's varlen kernel (FlashAttention-2, arXiv 2307.08691).

Its causal mask is aligned at the bottom right, which is what a run of queries at the end of its keys needs; it is not
what scattered queries need, so it serves chunks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from blendkv.kernels.types import AttentionParams

MOST_DIMS = 256


def refuses(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    params: AttentionParams,
    before: tuple[torch.Tensor, torch.Tensor] | None,
) -> str | None:
    """Why flash-attn does not take these arguments."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn takes bfloat16 and float16, not {q.dtype}"
    if params.sinks is not None:
        return "flash-attn knows no learned sinks"
    if v.shape[-1] != q.shape[-1] or q.shape[-1] > MOST_DIMS:
        return f"flash-attn takes one head dim of at most {MOST_DIMS} for K and V"
    return None


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    params: AttentionParams,
    before: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """See `blendkv.kernels.chunk_prefill`."""
    from flash_attn import flash_attn_varlen_func

    past = 0 if before is None else before[0].shape[0]
    own = torch.tensor([0, *lengths]).cumsum(0)
    if before is not None:
        k, v = (_behind(b, t, own.tolist()) for b, t in zip(before, (k, v), strict=True))
    queries = own.to(q.device, torch.int32, non_blocking=True)
    keys = (own + past * torch.arange(len(own))).to(q.device, torch.int32, non_blocking=True)
    longest = max(lengths, default=0)
    return flash_attn_varlen_func(
        q.contiguous(), k.contiguous(), v.contiguous(), queries, keys, longest, past + longest,
        softmax_scale=params.scale, causal=True, softcap=params.softcap or 0.0,
        window_size=(-1, -1) if params.window is None else (params.window - 1, 0),
    )  # fmt: skip


def _behind(prefix: torch.Tensor, rows: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """The prefix's rows before every chunk's own."""
    return torch.cat([part for a, b in pairwise(bounds) for part in (prefix, rows[a:b])])
