"""The Triton kernels of `blendkv.kernels.attention.triton`, which says how they divide the work."""

from __future__ import annotations

import triton
import triton.language as tl

from blendkv.kernels.jit import LN2, LOG2E, capped, product, read_rows, row_offsets

LEAST = tl.constexpr(-1e30)
"""Stands for minus infinity in running maxima, so that no difference of two of them is NaN."""


@triton.jit
def position_of(positions: tl.tensor, row: tl.tensor, limit: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Position of a row's query in 32 bits; those that see no key more than ``limit`` become that."""
    return tl.minimum(tl.load(positions + row // GROUP), limit).to(tl.int32)


@triton.jit
def squares(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Squared distance of each row."""
    gap = a.to(tl.float32) - b.to(tl.float32)
    return tl.sum(gap * gap, 1)


@triton.jit
def read_stored(
    stored_k: tl.tensor,
    stored_v: tl.tensor,
    key: tl.tensor,
    live: tl.tensor,
    sk_strides: tl.tuple,
    sv_strides: tl.tuple,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Tiles of the stored K and V."""
    at = key.to(tl.int64)
    k_tile = read_rows(stored_k, at * sk_strides[1], live, sk_strides[3], DIM, BLOCK_D, True)
    v_tile = read_rows(stored_v, at * sv_strides[1], live, sv_strides[3], V_DIM, BLOCK_V, True)
    return k_tile, v_tile


@triton.jit
def loop(
    state: tl.tuple,
    q_tile: tl.tensor,
    own: tl.tensor,
    cache: tl.tuple,
    strides: tl.tuple,
    stored: tl.tuple,
    bounds: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    inner: tl.tensor,
    factor: tl.tensor,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    MOVED: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tuple:
    """Online softmax over the key tiles from ``begin`` to ``end``."""
    acc, total, top = state[0], state[1], state[2]
    low, high, keys, window, moved_low, moved_high = bounds
    for start in range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        key = start + tl.arange(0, BLOCK_N)
        # What no row sees may hold anything: rows not written yet, or blocks behind the window that were given away.
        seen = (key >= low) & (key < high)
        live = seen
        if MOVED:
            live = key < keys
        offsets = row_offsets(key, live, cache[2], strides[0], PAGE)
        k_tile = read_rows(cache[0], offsets, live, strides[0][3], DIM, BLOCK_D, MASKED)
        found = capped(product(q_tile, tl.trans(k_tile), WIDE), inner, SOFTCAP)
        if MASKED:
            mask = seen[None, :] & (key[None, :] <= own[:, None])
            if WINDOW:
                mask = mask & (key[None, :] > own[:, None] - window)
            found = tl.where(mask, found, float("-inf"))
        best = tl.maximum(top, tl.max(found, 1))
        weights = tl.exp2((found - best[:, None]) * (factor * LOG2E))
        shrunk = tl.exp2((top - best) * (factor * LOG2E))
        total = total * shrunk + tl.sum(weights, 1)
        top = best
        offsets = row_offsets(key, live, cache[2], strides[1], PAGE)
        v_tile = read_rows(cache[1], offsets, live, strides[1][3], V_DIM, BLOCK_V, MASKED)
        if MOVED:
            measured = (key >= moved_low) & (key < moved_high)
            old_k, old_v = read_stored(
                stored[0], stored[1], key, measured, stored[3], stored[4], DIM, V_DIM, BLOCK_D, BLOCK_V
            )
            tl.store(stored[2] + key, squares(k_tile, old_k) + squares(v_tile, old_v), mask=measured)
            v_tile = tl.where(seen[:, None], v_tile, 0.0)
        acc = acc * shrunk[:, None] + product(weights.to(v_tile.dtype), v_tile, WIDE)
    return acc, total, top


@triton.jit
def measure(
    cache: tl.tuple,
    strides: tl.tuple,
    stored: tl.tuple,
    begin: tl.tensor,
    end: tl.tensor,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Deviation of keys that the tile's queries do not read."""
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        live = key < end
        at = key.to(tl.int64)
        k_tile = read_rows(cache[0], at * strides[0][1], live, strides[0][3], DIM, BLOCK_D, True)
        v_tile = read_rows(cache[1], at * strides[1][1], live, strides[1][3], V_DIM, BLOCK_V, True)
        old_k, old_v = read_stored(stored[0], stored[1], key, live, stored[3], stored[4], DIM, V_DIM, BLOCK_D, BLOCK_V)
        tl.store(stored[2] + key, squares(k_tile, old_k) + squares(v_tile, old_v), mask=live)


@triton.jit
def edges(
    positions: tl.tensor,
    tile: tl.tensor,
    rows: tl.tensor,
    keys: tl.tensor,
    window: tl.tensor,
    chunk: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MOVED: tl.constexpr,
) -> tl.tuple:
    """Where a tile's keys begin and end, within this program's part of them.

    Returns ``low`` and ``high``, outside of which no row sees a key; the first key of the first tile, of the first tile
    that the window hides from no row, and of the first one that not all rows see; the keys whose deviation this
    program measures.
    """
    limit = keys + window
    first = position_of(positions, tile * BLOCK_M, limit, GROUP)
    final = position_of(positions, tl.minimum((tile + 1) * BLOCK_M, rows) - 1, limit, GROUP)
    begin = tl.program_id(2) * chunk
    end = tl.minimum(begin + chunk, keys)
    reach = tl.minimum(final + 1, keys)
    low, high = 0, tl.minimum(reach, end)
    if WINDOW:
        low = tl.minimum(tl.maximum(first - window + 1, 0), reach)
    start = tl.maximum(low // BLOCK_N * BLOCK_N, begin)
    diagonal = tl.maximum(tl.minimum(first + 1, high) // BLOCK_N * BLOCK_N, start)
    moved_low, moved_high = 0, 0
    if MOVED:
        if tile > 0:
            before = position_of(positions, tile * BLOCK_M - 1, limit, GROUP)
            moved_low = tl.minimum(before + 1, keys) // BLOCK_N * BLOCK_N
        moved_high = keys
        if tile < tl.num_programs(0) - 1:
            moved_high = reach // BLOCK_N * BLOCK_N
        moved_low, moved_high = tl.maximum(moved_low, begin), tl.minimum(moved_high, end)
        diagonal = tl.minimum(diagonal, tl.maximum(moved_low, start))
    middle = start
    if WINDOW:
        middle = tl.cdiv(tl.maximum(final - window + 1, 0), BLOCK_N) * BLOCK_N
        middle = tl.minimum(tl.maximum(middle, start), diagonal)
    return low, high, start, middle, diagonal, moved_low, moved_high


@triton.jit(do_not_specialize=["rows", "keys", "window", "chunk"])
def attend(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    sinks: tl.tensor,
    stored_k: tl.tensor,
    stored_v: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    moved: tl.tensor,
    q_strides: tl.tuple,
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    sk_strides: tl.tuple,
    sv_strides: tl.tuple,
    rows: tl.tensor,
    keys: tl.tensor,
    window: tl.tensor,
    chunk: tl.tensor,
    inner: tl.tensor,
    factor: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    MOVED: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One tile of rows, one KV head, one part of the keys."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles have the most keys, and begin first
    head = tl.program_id(1).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < rows
    query, q_head = row // GROUP, head * GROUP + row % GROUP
    q_tile = read_rows(
        q, query.to(tl.int64) * q_strides[0] + q_head * q_strides[1], live, q_strides[2], DIM, BLOCK_D, True
    )
    own = tl.minimum(tl.load(positions + query, mask=live, other=0), keys + window).to(tl.int32)
    low, high, start, middle, diagonal, moved_low, moved_high = edges(
        positions, tile, rows, keys, window, chunk, GROUP, BLOCK_M, BLOCK_N, WINDOW, MOVED
    )

    cache, strides = (k + head * k_strides[2], v + head * v_strides[2], table), (k_strides, v_strides)
    stored = (k, v, out, k_strides, v_strides)  # not read unless MOVED
    if MOVED:
        stored = (
            stored_k + head * sk_strides[2], stored_v + head * sv_strides[2], moved + head * keys,
            sk_strides, sv_strides,
        )  # fmt: skip
        behind = tl.maximum(start, tl.cdiv(high, BLOCK_N) * BLOCK_N)
        measure(cache, strides, stored, moved_low, tl.minimum(start, moved_high), DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_V)
        measure(
            cache, strides, stored, tl.maximum(moved_low, behind), moved_high, DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_V
        )

    top = tl.full([BLOCK_M], LEAST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + q_head, mask=live, other=0.0).to(tl.float32)
        top = tl.maximum(sink / factor, LEAST)
        total = tl.where(sink > float("-inf"), 1.0, 0.0)
    state = (tl.zeros([BLOCK_M, BLOCK_V], tl.float32), total, top)
    bounds = (low, high, keys, window, moved_low, moved_high)
    if WINDOW:
        state = loop(
            state, q_tile, own, cache, strides, stored, bounds, start, middle, inner, factor,
            DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_V, PAGE, WINDOW, SOFTCAP, True, False, WIDE,
        )  # fmt: skip
    state = loop(
        state, q_tile, own, cache, strides, stored, bounds, middle, diagonal, inner, factor,
        DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_V, PAGE, WINDOW, SOFTCAP, False, False, WIDE,
    )  # fmt: skip
    state = loop(
        state, q_tile, own, cache, strides, stored, bounds, diagonal, high, inner, factor,
        DIM, V_DIM, BLOCK_N, BLOCK_D, BLOCK_V, PAGE, WINDOW, SOFTCAP, True, MOVED, WIDE,
    )  # fmt: skip

    acc, total, top = state[0], state[1], state[2]
    some = total > 0
    line = (tl.program_id(2).to(tl.int64) * (rows // GROUP) + query) * (tl.num_programs(1) * GROUP) + q_head
    tl.store(
        lse + line, tl.where(some, top * factor + tl.log2(tl.where(some, total, 1.0)) * LN2, float("-inf")), mask=live
    )
    if SPLIT:
        live = live & some
    acc = acc / tl.where(some, total, 1.0)[:, None]
    column = tl.arange(0, BLOCK_V)
    tl.store(out + line[:, None] * V_DIM + column[None, :], acc, mask=live[:, None] & (column < V_DIM)[None, :])


@triton.jit(do_not_specialize=["queries", "splits"])
def combine(
    part: tl.tensor,
    part_lse: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    queries: tl.tensor,
    splits: tl.tensor,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """One query and head: join the parts ``[splits, queries, q_heads, V_DIM]`` by their log-sum-exps."""
    q_heads = tl.num_programs(1)
    line = tl.program_id(0).to(tl.int64) * q_heads + tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    lines = split.to(tl.int64) * queries * q_heads + line
    each = tl.load(part_lse + lines, mask=split < splits, other=float("-inf"))
    top = tl.maximum(tl.max(each, 0), LEAST)
    if SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32)
        top = tl.maximum(top, sink)
    weights = tl.exp2((each - top) * LOG2E)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2((sink - top) * LOG2E)
    some = total > 0
    column = tl.arange(0, BLOCK_V)
    # A part that saw no key was not written.
    mask = (each > float("-inf"))[:, None] & (column < V_DIM)[None, :]
    parts = tl.load(part + lines[:, None] * V_DIM + column[None, :], mask=mask, other=0.0)
    total = tl.where(some, total, 1.0)
    joined = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out + line * V_DIM + column, joined, mask=column < V_DIM)
    tl.store(lse + line, tl.where(some, top + tl.log2(total) * LN2, float("-inf")))
