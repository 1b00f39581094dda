"""The equation itself: all scores, the mask, the softmax. Float32, or float64 for float64 arguments."""

from __future__ import annotations

import torch

from blendkv.kernels.gather import contiguous
from blendkv.kernels.types import AttentionOutput, AttentionParams, Paged


def refuses(*args: object, **kwargs: object) -> str | None:
    """Nothing."""
    return None


def scores(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """Masked scores ``[q_heads, queries, keys]`` of float arguments, minus infinity where a key is not seen."""
    spread = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    found = torch.einsum("qhd,khd->hqk", q, spread) * params.scale
    if params.softcap is not None:
        found = params.softcap * torch.tanh(found / params.softcap)
    key = torch.arange(k.shape[0], device=k.device)
    hidden = key > positions[:, None]
    if params.window is not None:
        hidden = hidden | (key <= positions[:, None] - params.window)
    return found.masked_fill(hidden, float("-inf"))


def run(
    q: torch.Tensor,
    k: torch.Tensor | Paged,
    v: torch.Tensor | None,
    positions: torch.Tensor,
    params: AttentionParams,
    *,
    want_lse: bool,
    stored: tuple[torch.Tensor, torch.Tensor] | None,
) -> AttentionOutput:
    """See `blendkv.kernels.selected_attention`."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, values = (t.to(wide) for t in contiguous(k, v))
    found = scores(q.to(wide), keys, positions, params)
    joined = found
    if params.sinks is not None:
        sinks = params.sinks.to(wide)[:, None, None].expand(-1, q.shape[0], 1)
        joined = torch.cat((found, sinks), -1)
    lse = joined.logsumexp(-1)
    weights = (found - lse.unsqueeze(-1)).exp().nan_to_num(0.0)  # -inf - -inf where a query sees nothing
    out = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(q.shape[1] // keys.shape[1], 1))
    deviation = None
    if stored is not None:
        deviation = sum((a - b.to(wide)).square().sum((-1, -2)) for a, b in zip((keys, values), stored, strict=True))
    return AttentionOutput(out.to(q.dtype), lse.T.contiguous() if want_lse else None, deviation)  # type: ignore[arg-type]
