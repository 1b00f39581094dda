"""Tiles of queries in plain torch: for machines without a compiler, and for what the other backends refuse.

Queries are taken in tiles, and a tile reads no key beyond its last position. The query heads that share a KV head are
rows of one matrix product, so that its keys are read once. On a GPU, plain attention goes to torch's fused kernels; on
a CPU the products are written out, because torch's fused kernel neither skips what the mask hides nor reaches oneDNN.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from blendkv.kernels import tiles
from blendkv.kernels.deviation import torch as deviation
from blendkv.kernels.gather import contiguous
from blendkv.kernels.tiles import Tile, product
from blendkv.kernels.types import AttentionOutput, AttentionParams, Paged


def refuses(*args: object, **kwargs: object) -> str | None:
    """Nothing."""
    return None


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
    keys, values = contiguous(k, v)
    moved = None if stored is None else deviation.run(keys, stored[0], values, stored[1], use_k=True, use_v=True)
    plain = params.softcap is None and params.sinks is None and not want_lse
    if q.device.type != "cpu" and plain:
        return AttentionOutput(_fused(q, keys, values, positions, params), None, moved)
    out, lse = _explicit(q, keys, values, positions, params)
    return AttentionOutput(out, lse if want_lse else None, moved)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """By torch's own fused kernel, tile by tile."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    for tile in tiles.split(positions, k.shape[0], params.window, tiles.FUSED):
        if tile.low >= tile.high:
            continue
        views = (q[tile.rows], k[tile.low : tile.high], v[tile.low : tile.high])
        tq, tk, tv = (x.transpose(0, 1).unsqueeze(0) for x in views)
        hidden = tiles.hidden(positions[tile.rows], tile.low, tile.high, params.window)
        mask = None if hidden is None else ~hidden
        part = scaled_dot_product_attention(tq, tk, tv, attn_mask=mask, scale=params.scale, enable_gqa=True)
        out[tile.rows] = part[0].transpose(0, 1).nan_to_num(0.0)
    return out


def _explicit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, params: AttentionParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in ``q``'s dtype and log-sum-exp, one KV head after the other."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
    lse = torch.empty(q.shape[0], q.shape[1], dtype=wide, device=q.device)
    parts = list(tiles.split_products(positions, q, k.shape[0], group, params.window))
    for head in range(k.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        sinks = None if params.sinks is None else params.sinks[heads].to(wide)
        keys, values = k[:, head].to(wide).contiguous(), v[:, head].to(wide).contiguous()
        for tile in parts:
            seen = slice(tile.low, tile.high)
            scores = tiles.scores(q[tile.rows, heads].to(wide), keys[seen], tile, params)
            weights, lse[tile.rows, heads] = _softmax(scores, tile, sinks)
            out[tile.rows, heads] = product(weights, values[seen].T).view(-1, group, v.shape[-1]).to(q.dtype)
    return out, lse


def _softmax(scores: torch.Tensor, tile: Tile, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights ``[queries x group, keys]``, in the scores' place, and log-sum-exp ``[queries, group]``."""
    queries = tile.rows.stop - tile.rows.start
    top = scores.amax(-1, keepdim=True) if scores.shape[1] else scores.new_full((len(scores), 1), float("-inf"))
    if sinks is not None:
        top = torch.maximum(top, sinks.repeat(queries)[:, None])
    top = top.clamp_(min=torch.finfo(scores.dtype).min)  # a query that sees nothing
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total += (sinks.repeat(queries)[:, None] - top).exp()
    lse = (total.log() + top).view(queries, -1)
    return weights.div_(total.clamp_(min=torch.finfo(scores.dtype).tiny)), lse
