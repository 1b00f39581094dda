"""FlashAttention's online softmax in C++ for the CPU's vectors: ``csrc/cpu/attention.cpp``."""

from __future__ import annotations

import torch

from blendkv.kernels import native
from blendkv.kernels.types import AttentionOutput, AttentionParams, Paged


def refuses(
    q: torch.Tensor,
    k: torch.Tensor | Paged,
    v: torch.Tensor | None,
    positions: torch.Tensor,
    params: AttentionParams,
    *,
    want_lse: bool,
    stored: tuple[torch.Tensor, torch.Tensor] | None,
) -> str | None:
    """Why it cannot take the arguments: float64, a head dim above 256, or a scale that is not positive."""
    values = k.v if isinstance(k, Paged) else v
    assert values is not None
    return native.refuses_scores(q, max(q.shape[2], values.shape[-1]), params.scale)


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
    _alive, paging = native.paging_of(k)
    if isinstance(k, Paged):
        keys, values, tokens = native.last_contiguous(k.k), native.last_contiguous(k.v), k.tokens
    else:
        assert v is not None
        keys, values, tokens = native.last_contiguous(k), native.last_contiguous(v), k.shape[0]
    q, positions = native.last_contiguous(q), positions.contiguous()
    queries, q_heads, head_dim = q.shape
    kv_heads, v_dim = values.shape[-2:]
    out = q.new_empty(queries, q_heads, v_dim)
    lse = q.new_empty(queries, q_heads, dtype=torch.float32) if want_lse else None
    sinks = None if params.sinks is None else params.sinks.to(torch.float32).contiguous()
    deviation: torch.Tensor | None = None
    kept: tuple[torch.Tensor, ...] = ()
    measured: tuple[int, ...] = (0,) * 7
    if stored is not None:
        kept = tuple(native.last_contiguous(t) for t in stored)
        deviation = q.new_empty(tokens, dtype=torch.float32)
        parts = (part for t in kept for part in (t.data_ptr(), *t.stride()[:2]))
        measured = (deviation.data_ptr(), *parts)
    packed = native.ATTENTION(
        q.data_ptr(), *q.stride()[:2], positions.data_ptr(), out.data_ptr(),
        0 if lse is None else lse.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
        *native.cache_of(keys), *native.cache_of(values), *paging, *measured,
        queries, q_heads, kv_heads, head_dim, v_dim, tokens, params.window or 0, native.DTYPES[q.dtype],
        torch.get_num_threads(), params.scale, params.softcap or 0.0,
    )  # fmt: skip
    native.function("attention")(packed)
    return AttentionOutput(out, lse, deviation)
