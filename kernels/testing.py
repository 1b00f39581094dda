"""How right a backend is: random cases, the reference in float64 beside plain torch, and one table of tolerances.

The rule (FlashAttention's): a backend's largest error against the reference in float64 is at most twice that of plain
torch in the same dtype on the same case, plus a few units of rounding of the result. Used by the tests, and by
``blendkv bench kernels``, which prints no speed-up of a backend that fails here.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from blendkv.kernels import codes, dispatch
from blendkv.kernels.attention import reference as attention_reference
from blendkv.kernels.mass import reference as mass_reference
from blendkv.kernels.ops import attention_mass, kv_deviation, rope_shift_scatter, selected_attention
from blendkv.kernels.rotation import RopeTable, rope_table
from blendkv.kernels.types import AttentionOutput, AttentionParams, Codec, Encoded, Paged, Statistic, Trend

ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Allowed beside twice plain torch's error, relative to the largest value: one unit of rounding of the result."""


@contextmanager
def forced(backend: str) -> Iterator[None]:
    """Compute every op by one backend while the block runs."""
    before = os.environ.get(dispatch.FORCE)
    os.environ[dispatch.FORCE] = backend
    try:
        yield
    finally:
        if before is None:
            del os.environ[dispatch.FORCE]
        else:
            os.environ[dispatch.FORCE] = before


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of the two attention ops; ``paged`` holds the same keys and values in shuffled blocks."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    params: AttentionParams
    stored: tuple[torch.Tensor, torch.Tensor]
    paged: Paged


def attention_case(
    rng: random.Random,
    queries: int,
    keys: int,
    *,
    head_dim: int = 64,
    v_dim: int | None = None,
    kv_heads: int = 2,
    group: int = 3,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    magnitude: float = 1.0,
    block: int = 16,
    device: str = "cpu",
) -> AttentionCase:
    """A random case: strided keys, as a cache holds them, at sorted random positions of the queries."""
    torch.manual_seed(rng.randrange(1 << 30))
    wide = v_dim or head_dim
    q = (torch.randn(queries, kv_heads * group, head_dim) * magnitude).to(dtype)
    k = torch.randn(kv_heads, keys, head_dim).to(dtype).transpose(0, 1)
    v = (torch.randn(kv_heads, keys, wide) * magnitude).to(dtype).transpose(0, 1)
    positions = torch.tensor(sorted(rng.sample(range(keys), queries)), dtype=torch.int64)
    heads = torch.randn(kv_heads * group) if sinks else None
    stored = tuple((t.float() + 0.1 * magnitude * torch.randn(t.shape)).to(dtype) for t in (k, v))
    blocks = math.ceil(keys / block)
    table = torch.tensor(rng.sample(range(blocks + 3), blocks), dtype=torch.int32)
    caches = []
    for t in (k, v):
        cache = torch.full((blocks + 3, block, kv_heads, t.shape[-1]), math.nan, dtype=dtype)
        slots = table.long().repeat_interleave(block)[:keys] * block + torch.arange(keys) % block
        cache.flatten(0, 1)[slots] = t
        caches.append(cache.to(device))
    params = AttentionParams(head_dim**-0.5, window, softcap, None if heads is None else heads.to(device))
    moved = (t.to(device) for t in (q, k, v, positions))
    q, k, v, positions = moved
    first, second = (t.to(device) for t in stored)
    return AttentionCase(
        q, k, v, positions, params, (first, second), Paged(caches[0], caches[1], table.to(device), keys)
    )


def exact_attention(case: AttentionCase) -> AttentionOutput:
    """The reference in float64."""
    sinks = None if case.params.sinks is None else case.params.sinks.double()
    return attention_reference.run(
        case.q.double(), case.k.double(), case.v.double(), case.positions, replace(case.params, sinks=sinks),
        want_lse=True, stored=(case.stored[0].double(), case.stored[1].double()),
    )  # fmt: skip


def _largest_score(case: AttentionCase) -> float:
    """Of all scores, the largest by absolute value, before soft-cap and mask."""
    if 0 in (case.q.shape[0], case.k.shape[0]):
        return 0.0
    group = case.q.shape[1] // case.k.shape[1]
    keys = case.k.double().repeat_interleave(group, 1)
    return float(torch.einsum("qhd,khd->hqk", case.q.double(), keys).abs().max() * case.params.scale)


def plain_attention(case: AttentionCase) -> torch.Tensor:
    """Plain torch in the case's dtype: SDPA with a boolean mask, written out where it has soft-caps or sinks."""
    key = torch.arange(case.k.shape[0], device=case.k.device)
    seen = key <= case.positions[:, None]
    if case.params.window is not None:
        seen &= key > case.positions[:, None] - case.params.window
    group = case.q.shape[1] // case.k.shape[1]
    q, k, v = case.q.transpose(0, 1), case.k.transpose(0, 1), case.v.transpose(0, 1)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    if case.params.softcap is None and case.params.sinks is None:
        out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, scale=case.params.scale)[0]
        return out.transpose(0, 1)
    scores = q @ k.transpose(1, 2) * case.params.scale
    if case.params.softcap is not None:
        scores = case.params.softcap * torch.tanh(scores / case.params.softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if case.params.sinks is not None:
        sinks = case.params.sinks.to(q.dtype)[:, None, None].expand(-1, q.shape[1], 1)
        weights = torch.cat((scores, sinks), -1).float().softmax(-1)[..., :-1].to(q.dtype)
    else:
        weights = scores.float().softmax(-1).to(q.dtype)
    return (weights @ v).transpose(0, 1)


@dataclass(frozen=True)
class Error:
    """Largest error of a result, of plain torch's, and what is allowed; all absolute."""

    ours: float
    plain: float
    allowed: float

    @property
    def red(self) -> bool:
        """Whether it is too large; NaN is."""
        return not self.ours <= self.allowed


def error(
    ours: torch.Tensor,
    plain: torch.Tensor | None,
    exact: torch.Tensor,
    dtype: torch.dtype,
    *,
    least: float = 0.0,
    exponent: float = 0.0,
) -> Error:
    """Compare with the reference; ``plain`` is plain torch's result, None where it has no such.

    ``least`` is what the largest value counts for at least: a logarithm can be near zero with all its terms large.
    ``exponent`` is the rounding of the exponents that the result was made from, a relative error of its terms.
    """
    if exact.numel() == 0:
        return Error(0.0, 0.0, 0.0)
    finite = exact.isfinite()
    if not torch.equal(finite, ours.isfinite()) or not torch.equal(exact[~finite], ours[~finite].to(exact.dtype)):
        return Error(math.nan, 0.0, 0.0)
    exact, ours = exact[finite], ours[finite].double()
    if exact.numel() == 0:
        return Error(0.0, 0.0, 0.0)
    theirs = 0.0 if plain is None else float((plain[finite].double() - exact).abs().max())
    allowed = 2 * theirs + (ROUNDING[dtype] + exponent) * max(least, float(exact.abs().max()))
    return Error(float((ours - exact).abs().max()), theirs, allowed)


def _statistics(norms: torch.Tensor) -> list[tuple[str, Statistic, torch.Tensor | None]]:
    return [("max", "max", None), ("mean", "mean", None), ("weighted", "max", norms)]


def check_attention(backend: str, case: AttentionCase, *, paged: bool = False) -> dict[str, Error]:
    """Errors of `selected_attention` and `attention_mass` by output: out, lse, deviation, max, mean, weighted."""
    exact, dtype = exact_attention(case), case.q.dtype
    plain = attention_reference.run(
        case.q, case.k, case.v, case.positions, case.params, want_lse=True, stored=case.stored
    )
    assert exact.lse is not None
    assert plain.lse is not None
    keys, values = (case.paged, None) if paged else (case.k, case.v)
    with forced(backend):
        got = selected_attention(
            case.q, keys, values, case.positions, case.params, want_lse=True, stored=None if paged else case.stored
        )
        assert got.lse is not None
        norms = case.v.float().norm(dim=-1)
        masses: dict[str, torch.Tensor] = {
            name: attention_mass(case.q, keys, case.positions, case.params, got.lse, statistic, weigh_by=weights)
            for name, statistic, weights in _statistics(norms)
        }
    single = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = 2 * torch.finfo(single).eps * _largest_score(case)
    found = {
        "out": error(got.out, plain_attention(case).nan_to_num(0.0), exact.out, dtype, exponent=exponent),
        "lse": error(got.lse, plain.lse, exact.lse, dtype, least=1.0),
    }
    if not paged:
        assert got.deviation is not None
        assert exact.deviation is not None
        found["deviation"] = error(got.deviation, plain.deviation, exact.deviation, single)
    sinks = None if case.params.sinks is None else case.params.sinks.double()
    params = replace(case.params, sinks=sinks)
    for name, statistic, weights in _statistics(norms):
        theirs = mass_reference.run(
            case.q, case.k, case.positions, case.params, plain.lse, statistic, weigh_by=weights
        )  # fmt: skip
        want = mass_reference.run(
            case.q.double(), case.k.double(), case.positions, params, exact.lse, statistic,
            weigh_by=None if weights is None else weights.double(),
        )  # fmt: skip
        found[name] = error(masses[name], theirs, want, dtype, exponent=exponent)
    return found


@dataclass(frozen=True)
class ScatterCase:
    """Arguments of `rope_shift_scatter`, outputs filled with NaN."""

    k: torch.Tensor | Encoded
    v: torch.Tensor | Encoded
    table: RopeTable | None
    k_out: torch.Tensor
    v_out: torch.Tensor
    slots: torch.Tensor | int
    k_bias: torch.Tensor | Trend | None
    v_bias: torch.Tensor | Trend | None


def scatter_case(
    rng: random.Random,
    tokens: int,
    *,
    head_dim: int = 64,
    v_dim: int | None = None,
    heads: int = 3,
    dtype: torch.dtype = torch.float32,
    codec: Codec = "raw",
    pairing: str | None = "half",
    rotated: int | None = None,
    offset: int = 0,
    bias: str = "none",
    paged: bool = False,
    run: bool = False,
    device: str = "cpu",
) -> ScatterCase:
    """A random case; ``bias`` is ``none``, ``span`` or ``trend``; a tenth of the slots are not written."""
    torch.manual_seed(rng.randrange(1 << 30))
    wide = v_dim or head_dim
    k, v = torch.randn(heads, tokens, head_dim).transpose(0, 1), torch.randn(tokens, heads, wide)
    sources = [t.to(dtype).to(device) if codec == "raw" else _move(codes.encode(t, codec), device) for t in (k, v)]
    table = None
    if pairing is not None:
        angle = torch.rand(tokens, (rotated or head_dim) // 2, device=device) * 6.28
        table = rope_table(angle.cos(), angle.sin(), pairing, offset)  # type: ignore[arg-type]
    block, places = 16, (tokens + 40) // 16 * 16
    slots: torch.Tensor | int = rng.randrange(places - tokens + 1)
    if not run:
        chosen = torch.tensor(rng.sample(range(places), tokens), dtype=torch.int64)
        chosen[torch.rand(tokens) < 0.1] = -1
        slots = chosen.to(device)
    outs = []
    for width in (head_dim, wide):
        form = (places // block, heads, block, width) if paged else (heads, places, width)
        out = torch.full(form, math.nan, dtype=dtype, device=device)
        outs.append(out.transpose(1, 2) if paged else out.transpose(0, 1))
    biases = [_bias(bias, tokens, heads, width, device) for width in (head_dim, wide)]
    return ScatterCase(sources[0], sources[1], table, outs[0], outs[1], slots, biases[0], biases[1])


def _bias(kind: str, tokens: int, heads: int, dim: int, device: str) -> torch.Tensor | Trend | None:
    if kind == "none":
        return None
    constant, slope = torch.randn(2, heads, dim, device=device)
    return constant if kind == "span" else Trend(constant, slope, torch.randn(tokens, device=device))


def _move(source: Encoded, device: str) -> Encoded:
    parts = {n: t.to(device) for n in ("data", "scale", "signs", "codebook") if (t := getattr(source, n)) is not None}
    return replace(source, **parts)


def check_scatter(backend: str, case: ScatterCase) -> dict[str, Error]:
    """Errors of K and V; what no slot names must stay as it was."""
    results: dict[str, list[torch.Tensor]] = {}
    for name in ("reference", "torch", backend):
        outs = [torch.empty_like(t).copy_(t) for t in (case.k_out, case.v_out)]
        if name == "reference":
            outs = [t.double() for t in outs]
        with forced(name):
            rope_shift_scatter(
                case.k, case.v, case.table, outs[0], outs[1], case.slots, k_bias=case.k_bias, v_bias=case.v_bias
            )
        results[name] = outs
    found = {}
    for i, part in enumerate("kv"):
        exact, plain, ours = (results[n][i] for n in ("reference", "torch", backend))
        untouched = exact.isnan()
        if not torch.equal(untouched, ours.isnan()):
            found[part] = Error(math.nan, 0.0, 0.0)
            continue
        found[part] = error(ours[~untouched], plain[~untouched], exact[~untouched], ours.dtype)
    return found


def check_deviation(backend: str, case: AttentionCase) -> dict[str, Error]:
    """Errors of `kv_deviation` for K, V and both."""
    stored_k, stored_v = case.stored
    single = torch.float64 if case.q.dtype == torch.float64 else torch.float32
    found = {}
    for name, use_k, use_v in (("k", True, False), ("v", False, True), ("kv", True, True)):
        with forced(backend):
            ours = kv_deviation(case.k, stored_k, case.v, stored_v, use_k=use_k, use_v=use_v)
        with forced("reference"):
            pairs = [t.double() for t in (case.k, stored_k, case.v, stored_v)]
            exact = kv_deviation(*pairs, use_k=use_k, use_v=use_v)
        found[name] = error(ours, None, exact, single)
    return found
