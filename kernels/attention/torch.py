"""Attention of scattered, position-sorted queries over a contiguous run of keys.

The mask is always ``key position <= query position`` (and the layer's window): a bottom-right causal mask over
scattered queries would let early tokens see later ones.

Queries are taken in tiles, and a tile reads no key beyond its last position. The query heads that share a KV head are
rows of one matrix product, so that its keys are read once. On a GPU, plain attention goes to torch's fused kernels; on
a CPU the products are written out, because torch's fused kernel neither skips what the mask hides nor reaches oneDNN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch.nn.functional import scaled_dot_product_attention

FUSED_TILE = 128
"""Queries per tile of a fused kernel."""
PRODUCT_ROWS = 96
"""Rows (queries x query heads per KV head) per thread and matrix product: its scores stay in the core's cache."""

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
    """Rows of the query and the keys ``low .. high - 1`` that they may see; those from ``masked`` on, not all may.

    ``hidden`` is bool ``[queries, high - masked]``, true where a query does not see a key; None where all see all.
    """

    rows: slice
    low: int
    high: int
    masked: int
    hidden: torch.Tensor | None


def _tiles(positions: torch.Tensor, keys: int, window: int | None, size: int) -> Iterator[_Tile]:
    """Tiles of at most ``size`` queries."""
    bounds = positions.tolist()
    for start in range(0, len(bounds), size):
        rows = slice(start, min(start + size, len(bounds)))
        first, high = bounds[rows.start], min(bounds[rows.stop - 1] + 1, keys)
        low = 0 if window is None else max(0, first - window + 1)
        # Without a window every query sees all keys up to the first one's position.
        masked = low if window is not None else min(first + 1, high)
        yield _Tile(rows, low, high, masked, _hidden(positions[rows], masked, high, window))


def _hidden(own: torch.Tensor, low: int, high: int, window: int | None) -> torch.Tensor | None:
    if low == high:
        return None
    key = torch.arange(low, high, device=own.device)
    hidden = key > own[:, None]
    if window is not None:
        hidden |= key <= own[:, None] - window
    return hidden


@cache
def _onednn() -> bool:
    """Whether oneDNN's matrix product is to be had: in float32 it is twice as fast as MKL's on AMD."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b.T`` in float32. ``a`` must be contiguous, and ``b`` or ``b.T`` (oneDNN is very slow on other strides)."""
    if a.device.type == "cpu" and _onednn():
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return a @ b.T


def _probabilities(q: torch.Tensor, k: torch.Tensor, tile: _Tile, params: AttentionParams) -> torch.Tensor:
    """Softmax weights ``[queries x group, keys]`` of one KV head (``params.sinks``: of its group).

    ``q`` is ``[queries, group, head_dim]``, already scaled, and ``k`` ``[keys, head_dim]``, both float32.
    """
    queries, group, dim = q.shape
    scores = _product(q.reshape(queries * group, dim), k)
    if params.softcap is not None:
        scores.div_(params.softcap).tanh_().mul_(params.softcap)
    if tile.hidden is not None:
        unsure = scores.view(queries, group, -1)[..., tile.masked - tile.low :]
        unsure.masked_fill_(tile.hidden[:, None], float("-inf"))
    if params.sinks is None:
        return scores.softmax(-1)
    sinks = params.sinks.float().repeat(queries)[:, None]
    return torch.cat((scores, sinks), -1).softmax(-1)[:, :-1].contiguous()


def _explicit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: list[_Tile], params: AttentionParams
) -> Iterator[tuple[_Tile, slice, torch.Tensor, torch.Tensor]]:
    """Yield (tile, query heads, output and weights ``[queries, group, ...]``), one KV head after the other."""
    group = q.shape[1] // k.shape[1]
    scaled = q.float() * params.scale
    for head in range(k.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        sinks = None if params.sinks is None else params.sinks[heads]
        own = AttentionParams(params.scale, params.window, params.softcap, sinks)
        keys, values = k[:, head].float().contiguous(), v[:, head].float().contiguous()
        for tile in tiles:
            queries, seen = tile.rows.stop - tile.rows.start, slice(tile.low, tile.high)
            p = _probabilities(scaled[tile.rows, heads], keys[seen], tile, own)
            yield tile, heads, _product(p, values[seen].T).view(queries, group, -1), p.view(queries, group, -1)


def _product_tiles(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, window: int | None) -> list[_Tile]:
    group = q.shape[1] // k.shape[1]
    rows = PRODUCT_ROWS * torch.get_num_threads() if q.device.type == "cpu" else FUSED_TILE * group
    return list(_tiles(positions, k.shape[0], window, max(1, rows // group)))


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
    if q.device.type == "cpu" or params.softcap is not None or params.sinks is not None:
        for tile, heads, part, _ in _explicit(q, k, v, _product_tiles(q, k, positions, params.window), params):
            out[tile.rows, heads] = part
        return out
    for tile in _tiles(positions, k.shape[0], params.window, FUSED_TILE):
        views = (q[tile.rows], k[tile.low : tile.high], v[tile.low : tile.high])
        tq, tk, tv = (x.transpose(0, 1).unsqueeze(0) for x in views)
        hidden = _hidden(positions[tile.rows], tile.low, tile.high, params.window)
        mask = None if hidden is None else ~hidden
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
    tiles = _product_tiles(q, k, positions, params.window)
    asking = {tile.rows.start: counted[tile.rows].nonzero()[:, 0] for tile in tiles}
    for tile, heads, part, p in _explicit(q, k, v, tiles, params):
        out[tile.rows, heads] = part
        chosen = asking[tile.rows.start]
        if len(chosen) == 0:
            continue
        total = mass[tile.low : tile.high]
        p = p if len(chosen) == len(part) else p[chosen]
        if statistic == "max":
            torch.maximum(total, p.amax((0, 1)), out=total)
        else:
            total.add_(p.sum((0, 1)))
    if statistic == "mean":
        mass.div_(max(1, int(counted.sum())) * q.shape[1])
    return out, mass
