"""Attention mass on a GPU: a program holds a tile of keys, and goes through the tiles of queries that may see them.

Its rows are (query, head) pairs of one KV head. Products are taken as keys x rows, so that the statistic over rows runs
along a thread's own values. What is kept is one number per KV head and key; KV heads are joined afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blendkv.kernels import jit
from blendkv.kernels.jit import LOG2E, capped, product, read_rows, row_offsets
from blendkv.kernels.types import AttentionParams, Paged, Statistic

TILES = {
    (64, False): (64, 64, 4, 3),
    (128, False): (64, 64, 4, 2),
    (256, False): (64, 32, 4, 2),
    (64, True): (32, 32, 4, 2),
    (128, True): (32, 32, 4, 2),
    (256, True): (32, 16, 4, 2),
}
"""Keys and rows of a tile, warps and pipeline stages, by head dim (up to) and whether it is float32.

Not measured. Few keys per program, since 2k keys of 3 heads should occupy a GPU; shared memory as for attention.
"""


def refuses(
    q: torch.Tensor,
    k: torch.Tensor | Paged,
    positions: torch.Tensor,
    params: AttentionParams,
    lse: torch.Tensor,
    statistic: Statistic,
    *,
    weigh_by: torch.Tensor | None,
) -> str | None:
    """Float64, head dims above 256, and tensors that are not on one GPU."""
    keys, table = (k.k, k.table) if isinstance(k, Paged) else (k, None)
    return jit.unusable([q], [keys, table, positions, lse, weigh_by]) or jit.too_wide(keys.shape[-1])


def run(
    q: torch.Tensor,
    k: torch.Tensor | Paged,
    positions: torch.Tensor,
    params: AttentionParams,
    lse: torch.Tensor,
    statistic: Statistic,
    *,
    weigh_by: torch.Tensor | None,
) -> torch.Tensor:
    """See `blendkv.kernels.attention_mass`."""
    keys, table, strides, page = jit.placed(k)
    tokens = k.tokens if isinstance(k, Paged) else keys.shape[0]
    queries, q_heads, dim = q.shape
    kv_heads = keys.shape[-2]
    if queries == 0 or tokens == 0:
        return torch.zeros(tokens, dtype=torch.float32, device=q.device)
    block_n, block_m, warps, stages = TILES[max(64, jit.padded(dim)), q.dtype == torch.float32]
    group, window = q_heads // kv_heads, jit.window_of(params)
    inner, factor = jit.factors(params)
    found = torch.empty(kv_heads, tokens, dtype=torch.float32, device=q.device)
    with jit.on(q.device):
        mass[triton.cdiv(tokens, block_n), kv_heads](
            q, keys, table, positions, lse, weigh_by, found,
            q.stride(), strides, lse.stride(), (0, 0) if weigh_by is None else weigh_by.stride(),
            queries, tokens, window, inner, factor,
            GROUP=group, DIM=dim, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=jit.padded(dim), PAGE=page,
            WINDOW=window > 0, SOFTCAP=params.softcap is not None, WEIGHED=weigh_by is not None,
            MEAN=statistic == "mean", WIDE=jit.wide_products(), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return found.amax(0) if statistic == "max" else found.sum(0).div_(queries * q_heads)


@triton.jit
def below(positions: tl.tensor, queries: tl.tensor, bound: tl.tensor) -> tl.tensor:
    """How many positions are below a bound, which is where the first other one stands: they are sorted."""
    found = tl.zeros([1024], tl.int32)
    for start in range(0, queries, 1024):
        at = start + tl.arange(0, 1024)
        found += (tl.load(positions + at, mask=at < queries, other=bound) < bound).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def scan(
    best: tl.tensor,
    k_tile: tl.tensor,
    key: tl.tensor,
    weight: tl.tensor,
    sources: tl.tuple,
    q_strides: tl.tuple,
    lse_strides: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    head: tl.tensor,
    keys: tl.tensor,
    window: tl.tensor,
    inner: tl.tensor,
    factor: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WEIGHED: tl.constexpr,
    MEAN: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """The statistic so far, with the rows ``begin .. end - 1``; without a mask, all see the whole tile of keys."""
    q, lse, positions = sources
    for start in range(begin, end, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        live = row < end
        query, q_head = (row // GROUP).to(tl.int64), head * GROUP + row % GROUP
        q_tile = read_rows(q, query * q_strides[0] + q_head * q_strides[1], live, q_strides[2], DIM, BLOCK_D, True)
        scores = capped(product(k_tile, tl.trans(q_tile), WIDE), inner, SOFTCAP) * factor
        at = lse + query * lse_strides[0] + q_head * lse_strides[1]
        # Nothing is weighed by rows beyond the end, and by queries that see nothing: their log-sum-exp is -inf.
        limit = tl.load(at, mask=live, other=float("inf")).to(tl.float32)
        limit = tl.where(limit > float("-inf"), limit, float("inf"))
        if MASKED:
            own = tl.minimum(tl.load(positions + query, mask=live, other=-1), keys + window).to(tl.int32)
            seen = key[:, None] <= own[None, :]
            if WINDOW:
                seen = seen & (key[:, None] > own[None, :] - window)
            scores = tl.where(seen, scores, float("-inf"))
        found = tl.exp2((scores - limit[None, :]) * LOG2E)
        if WEIGHED:
            found = found * weight[:, None]
        if MEAN:
            best += tl.sum(found, 1)
        else:
            best = tl.maximum(best, tl.max(found, 1))
    return best


@triton.jit(do_not_specialize=["queries", "keys", "window"])
def mass(
    q: tl.tensor,
    k: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    lse: tl.tensor,
    weigh_by: tl.tensor,
    out: tl.tensor,
    q_strides: tl.tuple,
    k_strides: tl.tuple,
    lse_strides: tl.tuple,
    w_strides: tl.tuple,
    queries: tl.tensor,
    keys: tl.tensor,
    window: tl.tensor,
    inner: tl.tensor,
    factor: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WEIGHED: tl.constexpr,
    MEAN: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One tile of keys and one KV head."""
    start, head = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    key = start + tl.arange(0, BLOCK_N)
    live = key < keys
    offsets = row_offsets(key, live, table, k_strides, PAGE) + head * k_strides[2]
    k_tile = read_rows(k, offsets, live, k_strides[3], DIM, BLOCK_D, True)
    weight = tl.zeros([BLOCK_N], tl.float32)
    if WEIGHED:
        at = weigh_by + key.to(tl.int64) * w_strides[0] + head * w_strides[1]
        weight = tl.load(at, mask=live, other=0.0).to(tl.float32)

    # Rows that see some of the keys; from `whole` to `fading`, they see all of them.
    begin = below(positions, queries, start) * GROUP
    whole = below(positions, queries, start + BLOCK_N - 1) * GROUP
    end = queries * GROUP
    fading = end
    if WINDOW:
        end = below(positions, queries, start + BLOCK_N - 1 + window) * GROUP
        fading = tl.maximum(below(positions, queries, start + window) * GROUP, whole)
    sources = (q, lse, positions)
    best = tl.zeros([BLOCK_N], tl.float32)
    best = scan(
        best, k_tile, key, weight, sources, q_strides, lse_strides, begin, whole, head, keys, window, inner, factor,
        GROUP, DIM, BLOCK_M, BLOCK_D, WINDOW, SOFTCAP, WEIGHED, MEAN, True, WIDE,
    )  # fmt: skip
    best = scan(
        best, k_tile, key, weight, sources, q_strides, lse_strides, whole, fading, head, keys, window, inner, factor,
        GROUP, DIM, BLOCK_M, BLOCK_D, WINDOW, SOFTCAP, WEIGHED, MEAN, False, WIDE,
    )  # fmt: skip
    if WINDOW:
        best = scan(
            best, k_tile, key, weight, sources, q_strides, lse_strides, fading, end, head, keys, window, inner, factor,
            GROUP, DIM, BLOCK_M, BLOCK_D, WINDOW, SOFTCAP, WEIGHED, MEAN, True, WIDE,
        )  # fmt: skip
    tl.store(out + head * keys + key, best, mask=live)
