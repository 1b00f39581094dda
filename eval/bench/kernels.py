"""`blendkv bench kernels`: every backend of every op against plain torch, in one run, and only where it is right.

Counted work: attention 4 x head_dim FLOPs per query head and (query, key) pair that the mask lets through, mass half of
it; bytes are those that must be read and written once. A ``time`` ratio is the baseline's time over ours, a ``rate``
ratio our rate over the baseline's.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.functional import scaled_dot_product_attention

from blendkv.errors import InputError
from blendkv.eval.bench.memory import peak_extra_bytes
from blendkv.kernels import (
    AttentionParams,
    Encoded,
    Move,
    Trend,
    attention_mass,
    backends,
    codes,
    dispatch,
    kv_deviation,
    rope_shift_scatter_all,
    rope_table,
    selected_attention,
    testing,
)
from blendkv.kernels.types import Codec

Call = Callable[[], object]
CHUNK = 512
"""Tokens of a chunk that is moved: a blend moves all of a prompt's with one call per layer."""
CODECS: tuple[Codec, ...] = ("raw", "int8", "turbo4")
DENSE = 4096
"""Tokens of the dense causal baseline at most: its rate changes little beyond, its time quadruples."""
ENCODED = 8192
"""Tokens of encoded chunks at most: rates change little beyond, and plain torch takes seconds to decode them."""
BEYOND_CACHES = 128 << 20
"""Bytes over which a memory-bound op is spread: a blend touches every layer's KV once, never twice in a row."""
QUESTION = 32
"""Queries of a question, at the prompt's end."""
BASELINE = "= "
"""What the names of baselines begin with."""


@dataclass(frozen=True)
class Shape:
    """Heads of a model's attention layer."""

    q_heads: int
    kv_heads: int
    head_dim: int


SHAPES: dict[str, Shape] = {
    "smollm2-135m": Shape(9, 3, 64),
    "llama-8b": Shape(32, 8, 128),
    "llama-70b": Shape(64, 8, 128),
}


@dataclass(frozen=True)
class KernelSettings:
    """What is measured: prompt sizes in tokens, the share of them that are queries, dtype, rounds, threads."""

    shapes: tuple[str, ...] = ("smollm2-135m", "llama-8b")
    sizes: tuple[int, ...] = (2048, 8192, 16384)
    selected: float = 0.1
    dtype: torch.dtype = torch.bfloat16
    repeats: int = 3
    threads: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        unknown = [s for s in self.shapes if s not in SHAPES]
        if unknown:
            raise InputError(f"unknown shape {unknown[0]!r}; allowed: {', '.join(SHAPES)}")
        if min(self.sizes) < 2 * QUESTION:
            raise InputError(f"a size is {min(self.sizes)} tokens; at least {2 * QUESTION} are allowed")
        if not 0 < self.selected <= 1:
            raise InputError(f"selected is {self.selected:g}; above 0 to 1 is allowed")
        if min(self.repeats, self.threads) < 1:
            raise InputError("repeats and threads must be 1 or more")


@dataclass(frozen=True)
class Baseline:
    """What a backend is compared with: by time for the same work, or by the rate of other work."""

    name: str
    call: Call
    by: Literal["time", "rate"]
    work: float = 0.0


@dataclass(frozen=True)
class Contest:
    """One op at one shape: what every backend runs, what it is compared with, and its check."""

    op: str
    shape: str
    call: Call
    baselines: tuple[Baseline, ...]
    check: Callable[[str], Mapping[str, testing.Error]]
    flops: float | None = None
    bytes_moved: float | None = None
    memory: bool = False


def usable(op: str, device: str) -> list[str]:
    """Backends of an op that work on a device, the reference left out."""
    order = dispatch.PREFERENCE[torch.device(device).type]
    return [b for b in order if b in dispatch.IMPLEMENTED[op] and backends.why_not(b) is None]


def run_kernels(settings: KernelSettings, tell: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """Measure, and return the rows of ``bench kernels`` (docs/kernels.md)."""
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with torch.inference_mode():
            return [row for contest in _contests(settings) for row in _measure(contest, settings, tell)]
    finally:
        torch.set_num_threads(before)


def _measure(contest: Contest, settings: KernelSettings, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    names = usable(contest.op, settings.device)
    errors = {name: contest.check(name) for name in names}
    calls: dict[str, Call] = {BASELINE + b.name: b.call for b in contest.baselines}
    calls |= dict.fromkeys(names, contest.call)
    times = _times(calls, settings.repeats, settings.device)
    memory = {name: _memory(name, call) if contest.memory else None for name, call in calls.items()}
    rows = []
    for name in names:
        red = any(e.red for e in errors[name].values())
        middle = times[name]["p50"] * 1e-6
        for base in contest.baselines:
            theirs = times[BASELINE + base.name]["p50"] * 1e-6
            ours = (contest.flops or contest.bytes_moved or 0.0) / middle
            ratio = theirs / middle if base.by == "time" else ours / (base.work / theirs)
            rows.append(
                {
                    "op": contest.op,
                    "backend": name,
                    "shape": contest.shape,
                    "dtype": str(settings.dtype).removeprefix("torch."),
                    "time_us": times[name],
                    "gflops": None if contest.flops is None else contest.flops / middle / 1e9,
                    "gbps": None if contest.bytes_moved is None else contest.bytes_moved / middle / 1e9,
                    "baseline": f"{base.name} ({base.by})",
                    "ratio": None if red else ratio,
                    "error": {part: [e.ours, e.allowed] for part, e in errors[name].items()},
                    "red": red,
                    "extra_bytes": memory[name],
                    "baseline_extra_bytes": memory[BASELINE + base.name],
                }
            )
    tell(f"{contest.op} {contest.shape}: " + ", ".join(f"{n} {times[n]['p50'] / 1e3:.2f} ms" for n in calls))
    return rows


def _backend(name: str) -> AbstractContextManager[None]:
    """What a call's loop runs in; entered once per loop, since it takes as long as some calls."""
    return nullcontext() if name.startswith(BASELINE) else testing.forced(name)


def _memory(name: str, call: Call) -> int:
    with _backend(name):
        return peak_extra_bytes(call)


def _times(calls: Mapping[str, Call], repeats: int, device: str) -> dict[str, dict[str, float]]:
    """Microseconds of every call, all in turn in each round; short ones are run several times a round."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)

    def once(name: str, loops: int) -> float:
        call = calls[name]
        with _backend(name):
            wait()
            began = time.perf_counter()
            for _ in range(loops):
                call()
            wait()
            return (time.perf_counter() - began) / loops * 1e6

    loops = {}
    for name in calls:
        once(name, 1)
        loops[name] = max(1, min(200, int(20_000 / once(name, 1))))
    seen: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name in calls:
            seen[name].append(once(name, loops[name]))
    return {name: _quantiles(values) for name, values in seen.items()}


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) == 1:
        return dict.fromkeys(("p20", "p50", "p80"), values[0])
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"p20": cuts[1], "p50": cuts[4], "p80": cuts[7]}


def _contests(settings: KernelSettings) -> Iterator[Contest]:
    rng = random.Random(0)
    for name in settings.shapes:
        for size in settings.sizes:
            yield _attention(name, size, settings, rng)
            yield _mass(name, size, settings, rng)
        for tokens in sorted({CHUNK, *settings.sizes}):
            for codec in CODECS if tokens <= ENCODED else CODECS[:1]:
                yield _scatter(name, [tokens], codec, settings, rng)
            if tokens > CHUNK:
                cuts = [min(CHUNK, tokens - start) for start in range(0, tokens, CHUNK)]
                yield _scatter(name, cuts, "raw", settings, rng)
        yield _deviation(name, settings, rng)


def _heads(settings: KernelSettings, tokens: int, heads: int, dim: int) -> torch.Tensor:
    """``[tokens, heads, dim]`` as a cache holds it, head by head."""
    return torch.randn(heads, tokens, dim).to(settings.dtype).to(settings.device).transpose(0, 1)


def _check(settings: KernelSettings, shape: Shape, rng: random.Random) -> Callable[[str], Mapping[str, testing.Error]]:
    case = testing.attention_case(
        rng, 64, 512, head_dim=shape.head_dim, kv_heads=shape.kv_heads, group=shape.q_heads // shape.kv_heads,
        dtype=settings.dtype, device=settings.device,
    )  # fmt: skip
    return lambda backend: testing.check_attention(backend, case)


def _attention(name: str, size: int, settings: KernelSettings, rng: random.Random) -> Contest:
    shape, device = SHAPES[name], settings.device
    positions = torch.tensor(sorted(rng.sample(range(size), max(1, int(settings.selected * size)))), device=device)
    q = torch.randn(len(positions), shape.q_heads, shape.head_dim).to(settings.dtype).to(device)
    k, v = (_heads(settings, size, shape.kv_heads, shape.head_dim) for _ in range(2))
    params = AttentionParams(shape.head_dim**-0.5)
    mask = torch.arange(size, device=device) <= positions[:, None]
    tq, tk, tv = (t.transpose(0, 1)[None] for t in (q, k, v))
    dense = min(size, DENSE)
    dq, dk, dv = (
        torch.randn(1, heads, dense, shape.head_dim).to(settings.dtype).to(device)
        for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)
    )
    flops = 4.0 * shape.head_dim * shape.q_heads
    return Contest(
        "attention",
        f"{name}, {len(positions)} of {size}",
        lambda: selected_attention(q, k, v, positions, params),
        (
            Baseline(
                "sdpa, boolean mask",
                lambda: scaled_dot_product_attention(tq, tk, tv, attn_mask=mask, scale=params.scale, enable_gqa=True),
                "time",
            ),
            Baseline(
                f"sdpa, dense causal, {dense}",
                lambda: scaled_dot_product_attention(dq, dk, dv, is_causal=True, enable_gqa=True),
                "rate",
                flops * dense * (dense + 1) / 2,
            ),
        ),
        _check(settings, shape, rng),
        flops=flops * float((positions + 1).sum()),
    )


def _mass(name: str, size: int, settings: KernelSettings, rng: random.Random) -> Contest:
    shape, device = SHAPES[name], settings.device
    positions = torch.arange(size - QUESTION, size, device=device)
    q = torch.randn(QUESTION, shape.q_heads, shape.head_dim).to(settings.dtype).to(device)
    k = _heads(settings, size, shape.kv_heads, shape.head_dim)
    params = AttentionParams(shape.head_dim**-0.5)
    lse = selected_attention(q, k, k, positions, params, want_lse=True).lse
    assert lse is not None
    mask = torch.arange(size, device=device) > positions[:, None]
    group = shape.q_heads // shape.kv_heads

    def materialised() -> torch.Tensor:
        rows = q.transpose(0, 1).unflatten(0, (-1, group))
        scores = (rows @ k.transpose(0, 1).transpose(1, 2)[:, None]).float() * params.scale
        return scores.masked_fill_(mask, float("-inf")).softmax(-1).amax((0, 1, 2))

    return Contest(
        "mass",
        f"{name}, {QUESTION} of {size}",
        lambda: attention_mass(q, k, positions, params, lse, "max"),
        (Baseline("softmax of materialised scores, max", materialised, "time"),),
        _check(settings, shape, rng),
        flops=2.0 * shape.head_dim * shape.q_heads * float((positions + 1).sum()),
        memory=True,
    )


@dataclass(frozen=True)
class Layer:
    """Chunks of one layer and where they go."""

    chunks: list[tuple[torch.Tensor | Encoded, torch.Tensor | Encoded]]
    outs: list[torch.Tensor]


def _layer(settings: KernelSettings, shape: Shape, lengths: Sequence[int], codec: Codec) -> Layer:
    chunks = []
    for tokens in lengths:
        raw = (torch.randn(tokens, shape.kv_heads, shape.head_dim).to(settings.dtype).to(settings.device) for _ in "kv")
        k, v = (t if codec == "raw" else codes.encode(t, codec) for t in raw)
        chunks.append((k, v))
    return Layer(chunks, [_heads(settings, sum(lengths), shape.kv_heads, shape.head_dim) for _ in "kv"])


def _bytes(source: torch.Tensor | Encoded) -> int:
    return source.nbytes if isinstance(source, torch.Tensor) else source.data.nbytes + source.scale.nbytes


def _scatter(name: str, lengths: Sequence[int], codec: Codec, settings: KernelSettings, rng: random.Random) -> Contest:
    """Chunks of some lengths side by side, under the most expensive shift, that of `head_query`."""
    shape, device, tokens = SHAPES[name], settings.device, sum(lengths)
    first = _layer(settings, shape, lengths, codec)
    moved = sum(_bytes(t) for pair in first.chunks for t in pair) + sum(t.nbytes for t in first.outs)
    copies = max(1, BEYOND_CACHES // moved)
    layers = itertools.cycle([first, *(_layer(settings, shape, lengths, codec) for _ in range(copies - 1))])
    buffers = itertools.cycle(
        [[torch.zeros(moved // 2, dtype=torch.uint8, device=device) for _ in range(2)] for _ in range(copies)]
    )
    angle = torch.rand(tokens, shape.head_dim // 2, device=device) * 6.28
    whole = rope_table(angle.cos(), angle.sin(), "half")
    starts = itertools.accumulate(lengths[:-1], initial=0)
    places = [(whole.rows(slice(start, start + n)), start) for start, n in zip(starts, lengths, strict=True)]
    shifts = [[_trend(shape, length, device) for _ in "kv"] for length in lengths]
    case = testing.scatter_case(
        rng, 200, head_dim=shape.head_dim, heads=shape.kv_heads, dtype=settings.dtype, codec=codec, bias="trend",
        run=True, device=device,
    )  # fmt: skip

    def move() -> None:
        layer = next(layers)
        moves = [Move(*chunk, *place, *shift) for chunk, place, shift in zip(layer.chunks, places, shifts, strict=True)]
        rope_shift_scatter_all(moves, *layer.outs)

    def copy() -> None:
        to, source = next(buffers)
        to.copy_(source)

    return Contest(
        "scatter",
        f"{name}, {tokens} tokens, {codec}" + (f", {len(lengths)} chunks" if len(lengths) > 1 else ""),
        move,
        (Baseline("copy of as many bytes", copy, "rate", float(moved)),),
        lambda backend: testing.check_scatter(backend, case),
        bytes_moved=float(moved),
    )


def _trend(shape: Shape, tokens: int, device: str) -> Trend:
    constant, slope = torch.randn(2, shape.kv_heads, shape.head_dim, device=device)
    return Trend(constant, slope, torch.rand(tokens, device=device))


def _deviation(name: str, settings: KernelSettings, rng: random.Random) -> Contest:
    shape, tokens = SHAPES[name], 4096
    parts = [_heads(settings, tokens, shape.kv_heads, shape.head_dim) for _ in range(4)]
    case = testing.attention_case(
        rng, 1, 300, head_dim=shape.head_dim, kv_heads=shape.kv_heads, dtype=settings.dtype, device=settings.device
    )
    k_a, k_b, v_a, v_b = parts
    return Contest(
        "deviation",
        f"{name}, {tokens} tokens",
        lambda: kv_deviation(k_a, k_b, v_a, v_b),
        (
            Baseline(
                "plain torch",
                lambda: sum((a.float() - b.float()).square().sum((-1, -2)) for a, b in ((k_a, k_b), (v_a, v_b))),
                "time",
            ),
        ),
        lambda backend: testing.check_deviation(backend, case),
        bytes_moved=float(sum(t.nbytes for t in parts)),
    )
