"""Time to first token: full prefill, full reuse and blends, side by side in one run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from blendkv.blend import BlendReport, BlendSettings, parse_mode
from blendkv.engines.base import GenerationOptions
from blendkv.engines.torch.engine import TorchEngine
from blendkv.errors import BlendKVError, InputError
from blendkv.eval.bench.flops import FlopModel
from blendkv.eval.bench.ingest import IngestRate, ingest_rate
from blendkv.eval.bench.memory import peak_extra_bytes
from blendkv.eval.fidelity import Fidelity, Reference, blended, noise_floor, reference
from blendkv.eval.rows import ModeSamples
from blendkv.eval.run import RED
from blendkv.eval.subject import CONTINUATION
from blendkv.library import ChunkLibrary
from blendkv.prompt import PromptBuilder
from blendkv.retrieval.load import PYTHON_REFERENCE, load_corpus
from blendkv.store.tiered import KVStore
from blendkv.types import Prompt, TokenIds, as_token_ids

MODES = (
    "full", "reuse", "blend:strided@0.03", "blend:head_query@0.05", "blend:chunk_head@0.05", "blend:kv_deviation@0.15",
)  # fmt: skip
QUESTION = "How are names resolved in a class body, and what does nonlocal change?"
_STAGES = ("score", "load", "rotate", "recompute", "question")


@dataclass(frozen=True)
class TtftSettings:
    """Size and length of a run. ``tiers`` are ``memory`` and ``disk`` (read with the page cache dropped)."""

    chunks: int = 6
    chunk_tokens: int = 400
    repeats: int = 5
    threads: int = 1
    modes: Sequence[str] = MODES
    tiers: Sequence[str] = ("memory", "disk")

    def __post_init__(self) -> None:
        for name in ("chunks", "chunk_tokens", "repeats", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is allowed")
        if not (self.modes and self.tiers):
            raise InputError("no mode, or no tier, is given; name at least one of each")
        for spec in self.modes:
            parse_mode(spec)
        if unknown := set(self.tiers) - {"memory", "disk"}:
            raise InputError(f"unknown tier {', '.join(sorted(unknown))}; allowed: memory, disk")


@dataclass
class TtftResult:
    """Rows per (mode, tier), the correctness check, and the ingest rate beside plain prefill.

    ``left_out`` has a line per mode that cannot run on this model, such as a budget below its rule's floor.
    """

    rows: list[dict[str, Any]]
    budget_one: Fidelity
    noise: Fidelity
    ingest: IngestRate
    left_out: list[str]

    @property
    def correct(self) -> bool:
        """Whether budget 1 was as close to full prefill as rounding allows."""
        return self.budget_one.kl <= RED


@dataclass
class _Lane:
    """One mode read from one tier."""

    spec: str
    tier: str
    samples: ModeSamples
    stages: list[dict[str, float]] = field(default_factory=list)
    peak: int | None = None


def real_chunks(tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, each: int | None = 1) -> list[TokenIds]:
    """Runs of ``tokens`` token ids of the Python language reference, at most ``each`` of a topic."""
    found: list[TokenIds] = []
    for document in load_corpus([PYTHON_REFERENCE], on_skip=_refuse):
        ids = tokenizer(document.text, add_special_tokens=False)["input_ids"]
        runs = [ids[first : first + tokens] for first in range(0, len(ids) - tokens + 1, tokens)]
        found += [as_token_ids(run) for run in runs[:each]]
        if len(found) >= count:
            return found[:count]
    what = "topics" if each == 1 else "runs"
    raise InputError(
        f"the Python reference has {len(found)} {what} of {tokens} tokens, asked for {count}: use fewer or smaller"
    )


def _refuse(error: BlendKVError) -> None:
    raise error


class _Bench:
    def __init__(self, engine: TorchEngine, settings: TtftSettings, folder: Path) -> None:
        self.engine, self.settings = engine, settings
        self.builder = PromptBuilder(engine.tokenizer)
        chunks = real_chunks(engine.tokenizer, settings.chunks, settings.chunk_tokens)
        self.prompt: Prompt = self.builder.first(chunks, QUESTION)
        engine.check_room(len(self.prompt) + CONTINUATION, ", 16 of them of the answer")
        self.chunks = chunks
        self.stores = {
            "memory": KVStore.open(None, memory_bytes=1 << 40),
            "disk": KVStore.open(folder, memory_bytes=0),
        }
        self.libraries = {
            tier: ChunkLibrary(engine, store, "system", self.builder.prefix) for tier, store in self.stores.items()
        }
        for library in self.libraries.values():
            library.readers(self.prompt)
            library.store.flush()

    def close(self) -> None:
        for store in self.stores.values():
            store.close()

    def first_token(self, lane: _Lane) -> None:
        """One timed request, from the call to the first token."""
        settings = lane.samples.mode.settings
        library = self.libraries[lane.tier]
        if lane.tier == "disk":
            library.store.drop_page_cache()
        options = GenerationOptions(max_new_tokens=1)
        began = time.perf_counter()
        report: BlendReport | None = None
        cache = None
        if settings is not None:
            cache = self.engine.new_cache(len(self.prompt) + 1)
            with library.source(self.prompt) as source:
                report = self.engine.blend(self.prompt, source, cache, settings, logits_to_keep=1)
        ready = time.perf_counter()
        decoder = self.engine.decoder(self.prompt.token_ids, cache, options, report.logits if report else None)
        for _ in decoder:
            pass
        assert decoder.first_token_at is not None
        lane.samples.ttft.append(decoder.first_token_at - began)
        if report is not None:
            lane.stages.append({**report.stages, "question": decoder.first_token_at - ready})
            lane.samples.reports.append(report)
            lane.samples.bytes_loaded = report.bytes_loaded

    def peak(self, settings: BlendSettings) -> int:
        """Bytes that a blend allocates beside the cache it fills."""
        cache = self.engine.new_cache(len(self.prompt))
        library = self.libraries["memory"]

        def run() -> None:
            with library.source(self.prompt) as source:
                self.engine.blend(self.prompt, source, cache, settings)

        return peak_extra_bytes(run)

    def fidelity(self, truth: Reference, settings: BlendSettings | None) -> Fidelity:
        if settings is None:
            return noise_floor(self.engine, self.prompt, truth)
        return blended(self.engine, self.libraries["memory"], self.prompt, truth, settings)[0]


def run_ttft(
    engine: TorchEngine, settings: TtftSettings, tell: Callable[[str], None] = lambda line: None
) -> TtftResult:
    """Measure every mode in turn, ``repeats`` times round, so that drift of the machine meets all of them alike.

    Fidelity is on one prompt; stage times are means over the repeats; ``peak_extra_bytes`` is what the blend
    allocates beside the KV cache that it fills.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with tempfile.TemporaryDirectory() as folder:
            bench = _Bench(engine, settings, Path(folder) / "store")
            try:
                return _run(bench, tell)
            finally:
                bench.close()
    finally:
        torch.set_num_threads(before)


def _run(bench: _Bench, tell: Callable[[str], None]) -> TtftResult:
    settings, engine = bench.settings, bench.engine
    truth = reference(engine, bench.prompt)
    tell("correctness: budget 1 against full prefill")
    budget_one = bench.fidelity(truth, BlendSettings("strided", 1.0))
    lanes = [
        _Lane(spec, tier, ModeSamples(parse_mode(spec)))
        for spec in settings.modes
        for tier in settings.tiers
        if parse_mode(spec).settings is not None or tier == settings.tiers[0]
    ]
    left_out: dict[str, str] = {}
    for lane in lanes:
        tell(f"fidelity and memory of {lane.spec}")
        try:
            _prepare(bench, lane, truth)
        except InputError as error:
            left_out[lane.spec] = f"{lane.spec}: {error}"
    lanes = [lane for lane in lanes if lane.spec not in left_out]
    for turn in range(settings.repeats):
        tell(f"time to first token, round {turn + 1}/{settings.repeats}")
        for lane in lanes:
            bench.first_token(lane)
    tell("ingest rate against plain batched prefill")
    rate = ingest_rate(engine, bench.chunks, bench.builder.prefix)
    result = TtftResult([], budget_one, noise_floor(engine, bench.prompt, truth), rate, list(left_out.values()))
    flops = FlopModel.counted(engine.runner)
    full = next((lane.samples for lane in lanes if lane.samples.mode.settings is None), None)
    result.rows = [_row(lane, full if result.correct else None, flops, len(bench.prompt)) for lane in lanes]
    return result


def _prepare(bench: _Bench, lane: _Lane, truth: Reference) -> None:
    """Fidelity, memory and a warm-up of one lane."""
    settings = lane.samples.mode.settings
    lane.samples.fidelity.append(bench.fidelity(truth, settings))
    if settings is not None:
        lane.peak = bench.peak(settings)
    bench.first_token(lane)
    lane.samples.ttft.clear()
    lane.stages.clear()


def _row(lane: _Lane, full: ModeSamples | None, flops: FlopModel, tokens: int) -> dict[str, Any]:
    row = lane.samples.row(full)
    reports = lane.samples.reports
    ideal = flops.full(tokens) / flops.blend(reports[-1]) if reports else 1.0
    stages = {
        name: round(float(np.mean([s[name] for s in lane.stages])) * 1e3, 3) if lane.stages else None
        for name in _STAGES
    }
    return {
        **row, "engine": "torch", "tier": lane.tier if reports else None, "ideal_speedup": round(ideal, 2),
        "stages_ms": stages, "peak_extra_bytes": lane.peak,
    }  # fmt: skip
