"""The ops: arguments are checked here, then the best backend computes them (`blendkv.kernels.dispatch`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from blendkv.errors import InputError
from blendkv.kernels import checks, dispatch
from blendkv.kernels.checks import FLOATS, refuse
from blendkv.kernels.rotation import RopeTable
from blendkv.kernels.types import BITS, AttentionOutput, AttentionParams, Encoded, Move, Paged, Statistic, Trend

INTEGERS = (torch.int32, torch.int64)
STORED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Dtypes of encoded sources; those of packed indices are uint8."""


def _check_params(params: AttentionParams, q: torch.Tensor) -> None:
    checks.at_least("params.window", params.window, 1)
    if params.softcap is not None and params.softcap <= 0:
        raise refuse("params.softcap", params.softcap, "a positive number")
    if params.sinks is not None:
        checks.shape("params.sinks", params.sinks, q.shape[1])
        checks.device("params.sinks", params.sinks, q, "q")


def _check_paged(paged: Paged, like: torch.Tensor) -> None:
    for name, cache in (("paged.k", paged.k), ("paged.v", paged.v)):
        checks.shape(name, cache, paged.k.shape[0], paged.k.shape[1], paged.k.shape[2], None)
        checks.dtype(name, cache, like.dtype)
        checks.device(name, cache, like, "q")
    checks.shape("paged.table", paged.table, None)
    checks.dtype("paged.table", paged.table, *INTEGERS)
    checks.device("paged.table", paged.table, like, "q")
    if not 0 <= paged.tokens <= len(paged.table) * paged.k.shape[1]:
        raise refuse("paged.tokens", paged.tokens, f"0 to {len(paged.table)} blocks of {paged.k.shape[1]} tokens")


def _check_queries(q: torch.Tensor, positions: torch.Tensor, kv_heads: int, head_dim: int) -> None:
    checks.shape("q", q, None, None, head_dim)
    checks.dtype("q", q, *FLOATS)
    checks.shape("positions", positions, q.shape[0])
    checks.dtype("positions", positions, torch.int64)
    checks.device("positions", positions, q, "q")
    if q.shape[1] % kv_heads:
        raise refuse("q", f"of {q.shape[1]} heads", f"a multiple of the {kv_heads} KV heads")


def _check_stored(stored: tuple[torch.Tensor, torch.Tensor] | None, k: torch.Tensor, v: torch.Tensor) -> None:
    if stored is not None:
        for name, tensor, like in (("stored[0]", stored[0], k), ("stored[1]", stored[1], v)):
            checks.shape(name, tensor, *like.shape)
            checks.dtype(name, tensor, like.dtype)
            checks.device(name, tensor, like, "q")


def selected_attention(
    q: torch.Tensor,
    k: torch.Tensor | Paged,
    v: torch.Tensor | None,
    positions: torch.Tensor,
    params: AttentionParams,
    *,
    want_lse: bool = False,
    stored: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> AttentionOutput:
    """Attend scattered queries, sorted by position, over keys at positions 0 .. S-1.

    The mask is ``key position <= query position`` and the layer's window; a bottom-right causal mask over scattered
    queries would let early tokens see later ones. No key beyond a query tile's last position is read (FlashAttention,
    arXiv 2205.14135, with the tiles' bounds taken from ``positions``).

    Parameters
    ----------
    q
        ``[queries, q_heads, head_dim]``; float64, float32, bfloat16 or float16.
    k, v
        ``[S, kv_heads, head_dim]`` and ``[S, kv_heads, v_head_dim]`` of any strides and ``q``'s dtype; or `Paged` and
        None. Query head h reads KV head h // (q_heads / kv_heads).
    positions
        ``[queries]`` int64, ascending, 0 or more; a query at or beyond S sees all keys within its window.
    params
        Scale, window, soft-cap and sinks of the layer.
    want_lse
        Also return the logarithm of each softmax's denominator, for `attention_mass`.
    stored
        K and V of the same tokens as stored, shaped as ``k`` and ``v``: also return the squared deviation per token,
        measured while K and V are read (the fused form of CacheBlend's HKVD, arXiv 2405.16444). Not with `Paged`.

    Returns
    -------
    AttentionOutput
        ``out`` in ``q``'s dtype, accumulated in float32 (float64 for float64). A query that sees no key gets zeros and
        a log-sum-exp of minus infinity (of the sink, where there is one).

    Raises
    ------
    InputError
        Naming the argument that does not fit.
    """
    if isinstance(k, Paged):
        if v is not None or stored is not None:
            raise refuse("v" if v is not None else "stored", "given beside paged keys", "None")
        _check_paged(k, q)
        heads, dim = k.k.shape[2], k.k.shape[3]
    else:
        if v is None:
            raise refuse("v", "None", "a tensor beside k")
        checks.shape("k", k, None, None, None)
        checks.shape("v", v, k.shape[0], k.shape[1], None)
        for name, tensor in (("k", k), ("v", v)):
            checks.dtype(name, tensor, q.dtype)
            checks.device(name, tensor, q, "q")
        _check_stored(stored, k, v)
        heads, dim = k.shape[1], k.shape[2]
    _check_queries(q, positions, heads, dim)
    _check_params(params, q)
    return dispatch.run("attention", q.device, q, k, v, positions, params, want_lse=want_lse, stored=stored)


def attention_mass(
    q: torch.Tensor,
    k: torch.Tensor | Paged,
    positions: torch.Tensor,
    params: AttentionParams,
    lse: torch.Tensor,
    statistic: Statistic,
    *,
    weigh_by: torch.Tensor | None = None,
) -> torch.Tensor:
    """How much attention every key receives: the max or mean over (queries, heads) of its probability.

    The probability is exp(score - lse), with the log-sum-exp that `selected_attention` returned for these queries: no
    matrix of queries x keys is kept, memory is one number per key.

    Parameters
    ----------
    q, k, positions, params
        As for `selected_attention`.
    lse
        ``[queries, q_heads]`` float32.
    statistic
        ``max`` or ``mean``.
    weigh_by
        ``[S, kv_heads]`` float32, multiplied in before the statistic: |V| of each key for attention x |V|.

    Returns
    -------
    torch.Tensor
        ``[S]`` float32 (float64 for float64); zero for keys that no query sees.
    """
    if isinstance(k, Paged):
        _check_paged(k, q)
        keys, heads, dim = k.tokens, k.k.shape[2], k.k.shape[3]
    else:
        checks.shape("k", k, None, None, None)
        checks.dtype("k", k, q.dtype)
        checks.device("k", k, q, "q")
        keys, heads, dim = k.shape
    _check_queries(q, positions, heads, dim)
    _check_params(params, q)
    checks.shape("lse", lse, q.shape[0], q.shape[1])
    checks.dtype("lse", lse, torch.float32, torch.float64)
    if statistic not in ("max", "mean"):
        raise refuse("statistic", repr(statistic), "'max' or 'mean'")
    if weigh_by is not None:
        checks.shape("weigh_by", weigh_by, keys, heads)
        checks.dtype("weigh_by", weigh_by, torch.float32, torch.float64)
        checks.device("weigh_by", weigh_by, q, "q")
    return dispatch.run("mass", q.device, q, k, positions, params, lse, statistic, weigh_by=weigh_by)


def chunk_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    params: AttentionParams,
    before: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Causal attention within each of several chunks, all behind the same prefix: the prefill of ingest.

    Parameters
    ----------
    q, k, v
        ``[rows, heads, dim]`` of the chunks one after the other, as for `selected_attention`.
    lengths
        Rows of every chunk.
    params
        Scale, window, soft-cap and sinks of the layer.
    before
        K (rotated) and V of the prefix, ``[prefix, kv_heads, dim]``.

    Returns
    -------
    torch.Tensor
        ``[rows, q_heads, v_head_dim]`` in ``q``'s dtype.
    """
    checks.shape("k", k, None, None, None)
    checks.shape("q", q, k.shape[0], None, k.shape[2])
    checks.shape("v", v, k.shape[0], k.shape[1], None)
    for name, tensor in (("k", k), ("v", v), *zip(("before[0]", "before[1]"), before or (), strict=False)):
        checks.dtype(name, tensor, q.dtype)
        checks.device(name, tensor, q, "q")
    if before is not None:
        checks.shape("before[0]", before[0], None, *k.shape[1:])
        checks.shape("before[1]", before[1], before[0].shape[0], *v.shape[1:])
    if sum(lengths) != q.shape[0] or min(lengths, default=1) < 1:
        raise refuse("lengths", list(lengths), f"numbers of 1 or more that add up to the {q.shape[0]} rows of q")
    _check_params(params, q)
    return dispatch.run("prefill", q.device, q, k, v, lengths, params, before)


def _check_source(name: str, source: torch.Tensor | Encoded, tokens: int | None, heads: int, dim: int) -> int:
    """Check K or V as stored; returns its tokens."""
    if isinstance(source, torch.Tensor):
        sizes = source.shape
        if len(sizes) != 3 or sizes[1:] != (heads, dim) or tokens not in (None, sizes[0]):
            checks.shape(name, source, tokens, heads, dim)
        checks.dtype(name, source, *FLOATS)
        return sizes[0]
    bits = BITS.get(source.codec, 8)
    if source.codec == "raw" or (source.codec not in BITS and source.codec not in ("fp8", "int8")):
        raise refuse(f"{name}.codec", repr(source.codec), ", ".join(("fp8", "int8", *BITS)) + "; raw is a plain tensor")
    if source.dim != dim:
        raise refuse(f"{name}.dim", source.dim, f"{dim}, that of {name}_out")
    checks.shape(f"{name}.data", source.data, tokens, heads, dim * bits // 8)
    checks.dtype(f"{name}.data", source.data, STORED.get(source.codec, torch.uint8))
    blocks = dim // (dim & -dim) if source.codec in BITS else 1
    checks.shape(f"{name}.scale", source.scale, source.data.shape[0], heads, blocks)
    checks.dtype(f"{name}.scale", source.scale, torch.float32)
    if source.codec in BITS:
        if source.signs is None or source.codebook is None:
            raise refuse(f"{name}.signs and {name}.codebook", "missing", f"tensors, for {source.codec}")
        checks.shape(f"{name}.signs", source.signs, dim)
        checks.shape(f"{name}.codebook", source.codebook, 2**bits)
    return source.data.shape[0]


def _check_bias(name: str, bias: torch.Tensor | Trend, tokens: int, heads: int, dim: int) -> None:
    if isinstance(bias, torch.Tensor):
        checks.shape(name, bias, heads, dim)
        checks.dtype(name, bias, torch.float32)
        return
    constant, slope, along = bias.constant, bias.slope, bias.along
    if (
        constant.shape == slope.shape == (heads, dim)
        and along.shape == (tokens,)
        and constant.dtype == slope.dtype == along.dtype == torch.float32
    ):
        return  # the names below are put together for errors alone: a chunk and layer has two trends
    for part, tensor, wanted in (
        ("constant", constant, (heads, dim)),
        ("slope", slope, (heads, dim)),
        ("along", along, (tokens,)),
    ):
        checks.shape(f"{name}.{part}", tensor, *wanted)
        checks.dtype(f"{name}.{part}", tensor, torch.float32)


def _places(name: str, out: torch.Tensor) -> tuple[int, ...]:
    """Sizes of an output's places: of a contiguous one, or of blocks."""
    if out.dim() not in (3, 4):
        raise refuse(name, f"of {out.dim()} dimensions", "3 (contiguous) or 4 (paged)")
    checks.dtype(name, out, *FLOATS)
    return out.shape[:-2]


def _check_slots(slots: torch.Tensor | int, tokens: int, places: int) -> None:
    if isinstance(slots, int):
        if not 0 <= slots <= places - tokens:
            raise refuse("slots", slots, f"0 to {places - tokens}, to hold {tokens} tokens in {places} places")
    else:
        checks.shape("slots", slots, tokens)
        checks.dtype("slots", slots, torch.int64)
        if slots.device.type == "cpu" and tokens and int(slots.max()) >= places:
            raise refuse("slots", f"up to {int(slots.max())}", f"below the output's {places} places")


def _check_move(move: Move, places: int, heads: int, k_dim: int, v_dim: int) -> None:
    k, v, table, slots, k_bias, v_bias = move
    tokens = _check_source("k", k, None, heads, k_dim)
    _check_source("v", v, tokens, heads, v_dim)
    if table is not None:
        rotated = table.cos.shape[-1]
        checks.shape("table.cos", table.cos, tokens, 1, rotated)
        if table.offset + rotated > k_dim:
            raise refuse("table", f"of {rotated} dims from {table.offset}", f"dims within a head's {k_dim}")
    if k_bias is not None:
        _check_bias("k_bias", k_bias, tokens, heads, k_dim)
    if v_bias is not None:
        _check_bias("v_bias", v_bias, tokens, heads, v_dim)
    _check_slots(slots, tokens, places)


def rope_shift_scatter(
    k: torch.Tensor | Encoded,
    v: torch.Tensor | Encoded,
    table: RopeTable | None,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    slots: torch.Tensor | int,
    *,
    k_bias: torch.Tensor | Trend | None = None,
    v_bias: torch.Tensor | Trend | None = None,
) -> None:
    """Decode stored K and V, add the chunk's shift, rotate K to its new positions, and write both where they belong.

    One read and one write of each (RoPE: RoFormer, arXiv 2104.09864); the arithmetic is float32.

    Parameters
    ----------
    k, v
        ``[tokens, kv_heads, head_dim]`` and ``[tokens, kv_heads, v_head_dim]``, K before RoPE, of any float dtype and
        strides; or `Encoded`, whose values a CPU rounds to the output's dtype first, as decoding alone would.
    table
        cos and sin of the tokens' new positions; None for a layer without RoPE.
    k_out, v_out
        Contiguous ``[S, kv_heads, dim]`` or paged ``[blocks, block_size, kv_heads, dim]``, any strides and float dtype;
        written at ``slots`` alone.
    slots
        ``[tokens]`` int64: the place of every token in the output, ``block * block_size + offset`` where it is paged;
        negative ones are not written. An int is the first of a run.
    k_bias, v_bias
        The shift: ``[kv_heads, dim]`` float32, or a `Trend`.

    Raises
    ------
    InputError
        Naming the argument that does not fit. Slots themselves are not checked on a GPU.
    """
    rope_shift_scatter_all((Move(k, v, table, slots, k_bias, v_bias),), k_out, v_out)


def rope_shift_scatter_all(moves: Sequence[Move], k_out: torch.Tensor, v_out: torch.Tensor) -> None:
    """`rope_shift_scatter` of several chunks into the same K and V: what a call costs is then paid once per layer.

    Parameters
    ----------
    moves
        The chunks, whose slots must not overlap.
    k_out, v_out
        As for `rope_shift_scatter`.

    Raises
    ------
    InputError
        Naming the chunk, where there are several, and the argument that does not fit.
    """
    sizes = _places("k_out", k_out)
    others, heads = _places("v_out", v_out), k_out.shape[-2]
    if others != sizes:
        raise refuse("v_out", f"of {list(others)} places", f"those of k_out, {list(sizes)}")
    checks.shape("v_out", v_out, *sizes, heads, v_out.shape[-1])
    limits = math.prod(sizes), heads, k_out.shape[-1], v_out.shape[-1]
    for index, move in enumerate(moves):
        try:
            _check_move(move, *limits)
        except InputError as error:
            raise InputError(f"moves[{index}]: {error}") if len(moves) > 1 else error  # noqa: B904
    dispatch.run("scatter", k_out.device, moves, k_out, v_out)


def kv_deviation(
    k_a: torch.Tensor,
    k_b: torch.Tensor,
    v_a: torch.Tensor,
    v_b: torch.Tensor,
    *,
    use_k: bool = True,
    use_v: bool = True,
) -> torch.Tensor:
    """Squared difference per token of K, of V, or of both (CacheBlend, arXiv 2405.16444, section 4).

    All have shape ``[tokens, kv_heads, head_dim]``, any strides (V may have its own head dim); a and b have one dtype.

    Returns
    -------
    torch.Tensor
        ``[tokens]`` float32 (float64 for float64), summed over heads and dims.
    """
    checks.shape("k_a", k_a, None, None, None)
    checks.shape("k_b", k_b, *k_a.shape)
    checks.shape("v_a", v_a, k_a.shape[0], None, None)
    checks.shape("v_b", v_b, *v_a.shape)
    checks.dtype("k_a", k_a, *FLOATS)
    for name, tensor in (("k_b", k_b), ("v_a", v_a), ("v_b", v_b)):
        checks.dtype(name, tensor, k_a.dtype)
        checks.device(name, tensor, k_a, "k_a")
    return dispatch.run("deviation", k_a.device, k_a, k_b, v_a, v_b, use_k=use_k, use_v=use_v)
