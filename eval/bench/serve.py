"""Many clients at once on a real vLLM: requests per second and time to first token, each mode on a fresh engine."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from blendkv.blend import parse_mode
from blendkv.engines.folders import resolve_folder
from blendkv.errors import InputError
from blendkv.eval.bench.process import MeasuringProcess, engine_environment
from blendkv.eval.bench.ttft import QUESTION, real_chunks
from blendkv.eval.bench.vllm_ttft import ENGINE, KV_BYTES, Case, Oracles, as_segments, check
from blendkv.eval.rows import percentiles_ms
from blendkv.prompt import PromptBuilder
from blendkv.types import TokenIds

MODES = ("full", "blend:head_query@0.05", "blend:strided@0.03")
_SERVER = "blendkv.eval.bench.serve_measured"


@dataclass(frozen=True)
class ServeSettings:
    """A closed loop: each of ``clients`` asks its next request when the last is answered, ``requests`` in all.

    A request holds ``chunks`` of ``documents`` chunks, drawn by Zipf with exponent ``zipf`` and shuffled. With ``cold``
    the store is empty at first; else it holds all chunks, as after an ingest.
    """

    clients: int = 16
    requests: int = 64
    documents: int = 64
    chunks: int = 5
    chunk_tokens: int = 400
    zipf: float = 1.0
    answer_tokens: int = 16
    cold: bool = False
    seed: int = 0
    threads: int = 1
    modes: Sequence[str] = MODES
    eager: bool = True
    memory_share: float | None = None

    def __post_init__(self) -> None:
        for name in ("clients", "requests", "documents", "chunks", "chunk_tokens", "answer_tokens", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is allowed")
        if self.chunks > self.documents:
            raise InputError(f"chunks is {self.chunks}; at most the {self.documents} documents are allowed")
        if not self.zipf >= 0:
            raise InputError(f"zipf is {self.zipf}; 0 (all alike) or more is allowed")
        if not self.modes:
            raise InputError("no mode is given; name at least one")
        for spec in self.modes:
            parse_mode(spec)


@dataclass
class ServeResult:
    """A row per mode, the engine's settings, and the oracles that were run before."""

    rows: list[dict[str, Any]]
    engine: dict[str, Any]
    oracles: Oracles

    @property
    def failures(self) -> list[str]:
        """Why no ratio is given; empty when all is well."""
        return self.oracles.failures


@dataclass
class _Load:
    """What the clients saw of one mode."""

    mode: str
    seconds: float
    cpu_seconds: float
    requests: list[dict[str, Any]]
    answered: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.answered = [r for r in self.requests if "error" not in r]

    @property
    def rate(self) -> float:
        """Requests answered per second."""
        return len(self.answered) / self.seconds


def draw(settings: ServeSettings) -> list[list[int]]:
    """The chunks of each request, by number; the same for the same settings."""
    rng = np.random.default_rng(settings.seed)
    weights = 1.0 / np.arange(1, settings.documents + 1) ** settings.zipf
    order = random.Random(settings.seed)
    found = []
    for _ in range(settings.requests):
        chosen = rng.choice(settings.documents, settings.chunks, replace=False, p=weights / weights.sum()).tolist()
        order.shuffle(chosen)
        found.append(chosen)
    return found


def run_serve(
    model: str, dtype: str, settings: ServeSettings, tell: Callable[[str], None] = lambda line: None
) -> ServeResult:
    """Fill the store and check the oracles, then put the same requests to a fresh vLLM per mode.

    Raises
    ------
    BlendKVError
        If an engine cannot be started, or an oracle cannot be run.
    """
    folder = resolve_folder(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    builder = PromptBuilder(tokenizer)
    chunks = real_chunks(tokenizer, settings.documents, settings.chunk_tokens, each=None)
    prompts = [as_segments(builder.first([chunks[i] for i in drawn], QUESTION)) for drawn in draw(settings)]
    longest = max(sum(len(run) for _, run in segments) for segments in prompts)
    start = {
        "model": str(folder), "dtype": dtype, "max_model_len": longest + settings.answer_tokens + 32,
        "eager": settings.eager, "memory_share": settings.memory_share,
    }  # fmt: skip
    loads: list[_Load] = []
    with tempfile.TemporaryDirectory() as scratch:
        store = str(Path(scratch) / "store")
        oracles = _fill(start, settings, builder, chunks, store, tell)
        for spec in settings.modes:
            found, engine = _load(start, settings, spec, prompts, store, Path(scratch), tell)
            loads.append(found)
    full = next((load for load in loads if load.mode == "full"), None)
    rows = [_row(load, settings, None if oracles.failures else full) for load in loads]
    return ServeResult(rows, {**engine, "threads": settings.threads}, oracles)


def _fill(
    start: dict[str, Any],
    settings: ServeSettings,
    builder: PromptBuilder,
    chunks: Sequence[TokenIds],
    store: str,
    tell: Callable[[str], None],
) -> Oracles:
    """Check the oracles on one prompt and compute the chunk KV of all documents, unless the store is to be empty."""
    with (
        tempfile.TemporaryDirectory() as elsewhere,
        MeasuringProcess(ENGINE, engine_environment(settings.threads, KV_BYTES)) as engine,
    ):
        tell("correctness, and filling the store: loading vLLM")
        target = str(Path(elsewhere) / "store") if settings.cold else store
        facts = engine.call("start", **start, store=target, min_saving=-1.0)
        case = Case(builder, chunks[: settings.chunks])
        oracles = check(engine, case, facts["dtype"])
        if not settings.cold:
            for first in range(0, len(chunks), 8):
                tell(f"chunk KV {first}/{len(chunks)}")
                engine.call("precompute", prefix=case.prefix, chunks=[c.tolist() for c in chunks[first : first + 8]])
    return oracles


def _load(
    start: dict[str, Any],
    settings: ServeSettings,
    spec: str,
    prompts: list[list[list[Any]]],
    store: str,
    scratch: Path,
    tell: Callable[[str], None],
) -> tuple[_Load, dict[str, Any]]:
    """Put all requests to a fresh engine in one mode; full prefill runs without the connector."""
    mode = parse_mode(spec)
    blends = mode.settings is not None
    if settings.cold:
        store = str(scratch / f"cold-{spec.replace(':', '-')}")
    with MeasuringProcess(_SERVER, engine_environment(settings.threads, KV_BYTES)) as server:
        tell(f"{spec}: loading vLLM")
        engine = server.call("start", **start, store=store if blends else None)
        warm = [[[kind, run[:1] if kind == "chunk" else run] for kind, run in prompts[0]]]
        server.call("load", requests=warm, mode=None, clients=1, answer_tokens=1)
        tell(f"{spec}: {len(prompts)} requests by {settings.clients} clients")
        found = server.call(
            "load", requests=prompts, mode=str(mode) if blends else None, clients=settings.clients,
            answer_tokens=settings.answer_tokens,
        )  # fmt: skip
    return _Load(str(mode), found["seconds"], found["cpu_seconds"], found["requests"]), engine


def _row(load: _Load, settings: ServeSettings, full: _Load | None) -> dict[str, Any]:
    told = [r["told"] for r in load.answered if r["told"] is not None]
    prompt_tokens = sum(r["prompt_tokens"] for r in load.answered)
    chunk_tokens = settings.chunks * settings.chunk_tokens * len(load.answered)
    cached = sum(r["cached_tokens"] for r in load.answered if (r["told"] or {}).get("outcome") != "blended")
    return {
        "mode": load.mode, "clients": settings.clients, "requests_per_s": round(load.rate, 4),
        "ttft_ms": percentiles_ms([r["ttft"] for r in load.answered]),
        "errors": len(load.requests) - len(load.answered),
        "throughput_ratio": round(load.rate / full.rate, 3) if full is not None and full.rate else None,
        "cpu_s_per_request": round(load.cpu_seconds / len(load.answered), 4) if load.answered else None,
        "latency_ms": percentiles_ms([r["latency"] for r in load.answered]),
        "prefix_hit_rate": round(cached / prompt_tokens, 4) if prompt_tokens else None,
        "chunk_hit_rate": round(sum(t.get("reusable_tokens", 0) for t in told) / chunk_tokens, 4) if told else None,
        "outcomes": dict(Counter(t["reason"] or t["outcome"] for t in told)),
        "error_messages": sorted({r["error"] for r in load.requests if "error" in r}),
    }  # fmt: skip
