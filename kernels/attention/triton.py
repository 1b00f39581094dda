"""Selected attention on a GPU: FlashAttention-2 (arXiv 2307.08691) with the tiles' bounds taken from the positions.

A tile's rows are (query, head) pairs of one KV head, so that its keys are read once for all heads that share them. Its
key loop begins at the first key that its first query may see and ends at the last query's position; only the key tiles
at those two edges are masked. The bounds are read on the device: nothing waits for the host.

The deviation of a key is computed by one program: tile t measures the key tiles that end behind tile t - 1's last
position, which are the ones at its own diagonal, and those that no query reads. Heads are summed afterwards.

With few queries the keys are split among programs, whose parts `combine` joins through their log-sum-exps (as in
FlashDecoding).
"""

from __future__ import annotations

import torch
import triton

from blendkv.kernels import jit
from blendkv.kernels.attention.triton_kernels import attend, combine
from blendkv.kernels.deviation import triton as deviation
from blendkv.kernels.types import AttentionOutput, AttentionParams, Paged

MAX_SPLITS = 64
"""Parts that one program joins."""
SPLIT_TILES = 4
"""Key tiles that a part has at least: with fewer, writing and joining it costs more than reading its keys."""
TILES = {
    (64, False): (128, 64, 8, 3),
    (128, False): (128, 32, 8, 3),
    (256, False): (64, 32, 8, 2),
    (64, True): (32, 32, 4, 2),
    (128, True): (32, 16, 4, 2),
    (256, True): (16, 16, 4, 2),
}
"""Rows and keys of a tile, warps and pipeline stages, by head dim (up to) and whether it is float32.

Not measured. Chosen so that the queries, keys and values of all stages fit 99 KB of shared memory (sm_86, sm_89; sm_80
and sm_90 have more) and 64 KB on an MI300, and so that the compilers keep accumulator and scores in registers: without
spilling on sm_80, sm_90 and gfx942 in the plain and the paged form.
"""


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
    """Float64, head dims above 256, a scale that is not positive, and tensors that are not on one GPU."""
    keys, values = (k.k, k.v) if isinstance(k, Paged) else (k, v)
    assert values is not None
    table = k.table if isinstance(k, Paged) else None
    others = [keys, values, table, positions, params.sinks, *(stored or ())]
    return jit.unusable([q], others) or jit.too_wide(keys.shape[-1], values.shape[-1]) or jit.unscaled(params)


def split(programs: int, key_tiles: int, cores: int) -> int:
    """Among how many programs to split the keys so that about two run on each multiprocessor."""
    return max(1, min(2 * cores // programs, key_tiles // SPLIT_TILES, MAX_SPLITS))


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
    keys, table, k_strides, page = jit.placed(k)
    values, _, v_strides, _ = jit.placed(k if isinstance(k, Paged) else v, "v")  # type: ignore[arg-type]
    tokens = k.tokens if isinstance(k, Paged) else keys.shape[0]
    queries, q_heads, dim = q.shape
    kv_heads, wide = keys.shape[-2], values.shape[-1]
    if queries == 0 or q_heads == 0:
        moved = None if stored is None else deviation.run(keys, stored[0], values, stored[1], use_k=True, use_v=True)
        return AttentionOutput(q.new_empty(queries, q_heads, wide), _no_lse(q) if want_lse else None, moved)
    group, single = q_heads // kv_heads, q.dtype == torch.float32
    block_m, block_n, warps, stages = TILES[max(64, jit.padded(max(dim, wide))), single]
    rows = queries * group
    block_m = min(block_m, jit.padded(rows))
    tiles, key_tiles = triton.cdiv(rows, block_m), triton.cdiv(tokens, block_n)
    splits = split(tiles * kv_heads, key_tiles, jit.cores(q.device))
    chunk = triton.cdiv(key_tiles, splits) * block_n
    window = jit.window_of(params)
    inner, factor = jit.factors(params)
    out = q.new_empty(queries, q_heads, wide)
    lse = torch.empty(queries, q_heads, dtype=torch.float32, device=q.device)
    part, part_lse = (
        (out, lse) if splits == 1 else (lse.new_empty(splits, *out.shape), lse.new_empty(splits, *lse.shape))
    )
    moved = None if stored is None else lse.new_empty(kv_heads, tokens)
    stored_k, stored_v = (None, None) if stored is None else stored
    with jit.on(q.device):
        attend[tiles, kv_heads, splits](
            q, keys, values, table, positions, params.sinks if splits == 1 else None,
            stored_k, stored_v, part, part_lse, moved,
            q.stride(), k_strides, v_strides, _strides(stored_k), _strides(stored_v),
            rows, tokens, window, chunk, inner, factor,
            GROUP=group, DIM=dim, V_DIM=wide, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=jit.padded(dim),
            BLOCK_V=jit.padded(wide), PAGE=page, WINDOW=window > 0, SOFTCAP=params.softcap is not None,
            SINKS=params.sinks is not None and splits == 1, MOVED=stored is not None, SPLIT=splits > 1,
            WIDE=jit.wide_products(), num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if splits > 1:
            combine[queries, q_heads](
                part, part_lse, params.sinks, out, lse, queries, splits,
                V_DIM=wide, BLOCK_V=jit.padded(wide), BLOCK_S=triton.next_power_of_2(splits),
                SINKS=params.sinks is not None,
            )  # fmt: skip
    return AttentionOutput(out, lse if want_lse else None, None if moved is None else moved.sum(0))


def _strides(stored: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if stored is None else (0, *stored.stride())


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
