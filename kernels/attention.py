"""Attention of scattered, position-sorted queries over a contiguous run of keys.

The mask is always ``key position <= query position`` (and the layer's window): a bottom-right causal mask over
scattered queries would let early tokens see later ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import scaled_dot_product_attention

TILE = 128
"""Queries per tile. A tile never reads keys beyond its last position, nor before its first one's window."""

Statistic = Literal["max", "mean"]


@dataclass(frozen=True)
class AttentionParams:
    """What a layer's attention does besides softmax(q k) v.

    ``scale`` multiplies the scores; ``window`` is a sliding window in tokens, the query's own included; ``softcap``
    bounds the scores by tanh (Gemma-2); ``sinks`` are ``[q_heads]`` logits that join the denominator (gpt-oss).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class _Tile:
    """Rows of the query, the keys ``low .. high - 1`` that they may see, and their positions."""

    rows: slice
    low: int
    high: int
    first: int
    positions: torch.Tensor


def _tiles(positions: torch.Tensor, keys: int, window: int | None) -> Iterator[_Tile]:
    bounds = positions.tolist()
    for start in range(0, len(bounds), TILE):
        rows = slice(start, min(start + TILE, len(bounds)))
        first, last = bounds[rows.start], bounds[rows.stop - 1]
        low = 0 if window is None else max(0, first - window + 1)
        yield _Tile(rows, low, min(last + 1, keys), first, positions[rows])


def _visible(tile: _Tile, low: int, window: int | None) -> torch.Tensor:
    """Bool ``[queries, high - low]``, true where a query sees a key."""
    key = torch.arange(low, tile.high, device=tile.positions.device)
    mask = key <= tile.positions[:, None]
    if window is not None:
        mask &= key > tile.positions[:, None] - window
    return mask


def _probabilities(q: torch.Tensor, k: torch.Tensor, tile: _Tile, params: AttentionParams) -> torch.Tensor:
    """Softmax weights ``[group, queries, keys]`` in float32 of one KV head (``params.sinks``: of its group)."""
    queries, group, dim = q.shape
    scores = (q.transpose(0, 1).reshape(group * queries, dim).float() @ k.float().T).view(group, queries, -1)
    scores.mul_(params.scale)
    if params.softcap is not None:
        scores.div_(params.softcap).tanh_().mul_(params.softcap)
    # Without a window every query sees all keys up to the tile's first position: only the rest needs a mask.
    masked_from = tile.low if params.window is not None else min(tile.first + 1, tile.high)
    hidden = ~_visible(tile, masked_from, params.window)
    scores[..., masked_from - tile.low :].masked_fill_(hidden, float("-inf"))
    if params.sinks is None:
        return scores.softmax(-1)
    sink = params.sinks.float().view(group, 1, 1).expand(group, queries, 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def _explicit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: _Tile, params: AttentionParams
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield (query heads, their output ``[queries, group, dim]``, weights) of one KV head after the other."""
    group = q.shape[1] // k.shape[1]
    for head in range(k.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        sinks = None if params.sinks is None else params.sinks[heads]
        own = AttentionParams(params.scale, params.window, params.softcap, sinks)
        p = _probabilities(q[tile.rows, heads], k[tile.low : tile.high, head], tile, own)
        yield heads, (p @ v[tile.low : tile.high, head].float()).transpose(0, 1), p


def selected_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Attend ``q`` at ``positions`` over keys at positions 0 .. S-1.

    Parameters
    ----------
    q
        ``[queries, q_heads, head_dim]``.
    k, v
        ``[S, kv_heads, head_dim]`` and ``[S, kv_heads, v_head_dim]``, any strides; query head h reads KV head
        h // (q_heads / kv_heads).
    positions
        ``[queries]`` int64, ascending, on the device of ``q``.
    params
        Scale, window, soft-cap and sinks of the layer.

    Returns
    -------
    torch.Tensor
        ``[queries, q_heads, v_head_dim]`` in ``q``'s dtype, accumulated in float32.
    """
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
    for tile in _tiles(positions, k.shape[0], params.window):
        if params.softcap is not None or params.sinks is not None:
            for heads, part, _ in _explicit(q, k, v, tile, params):
                out[tile.rows, heads] = part.to(out.dtype)
            continue
        views = (q[tile.rows], k[tile.low : tile.high], v[tile.low : tile.high])
        tq, tk, tv = (x.transpose(0, 1).unsqueeze(0) for x in views)
        mask = _visible(tile, tile.low, params.window)
        part = scaled_dot_product_attention(tq, tk, tv, attn_mask=mask, scale=params.scale, enable_gqa=True)
        out[tile.rows] = part[0].transpose(0, 1)
    return out


def scored_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    params: AttentionParams,
    counted: torch.Tensor,
    statistic: Statistic,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `selected_attention` does, and return how much attention every key received.

    ``counted`` (``[queries]`` bool) says which queries count: the question's. The mass of a key is the max, or the
    mean, over (heads, counted queries) of the attention probability.

    Returns
    -------
    tuple
        Output ``[queries, q_heads, v_head_dim]`` and mass ``[S]`` float32.
    """
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
    mass = torch.zeros(k.shape[0], dtype=torch.float32, device=q.device)
    for tile in _tiles(positions, k.shape[0], params.window):
        chosen = counted[tile.rows]
        some, every = bool(chosen.any()), bool(chosen.all())
        total = mass[tile.low : tile.high]
        for heads, part, p in _explicit(q, k, v, tile, params):
            out[tile.rows, heads] = part.to(out.dtype)
            if not some:
                continue
            weights = p if every else p[:, chosen]
            if statistic == "max":
                torch.maximum(total, weights.amax((0, 1)), out=total)
            else:
                total.add_(weights.sum((0, 1)))
    if statistic == "mean":
        mass.div_(max(1, int(counted.sum())) * q.shape[1])
    return out, mass
