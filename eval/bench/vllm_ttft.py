"""Time to first token inside vLLM: plain prefill against reuse and blends, and what the connector costs the others.

Three engines, each in a process of its own. One, which blends whatever it is asked to, is checked for correctness and
closed. Then one with the connector as users configure it and one without it take turns: the speed-up is between two
requests of the same engine, the connector's cost is between the two engines.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from blendkv.blend import BlendSummary, parse_mode
from blendkv.engines.folders import resolve_folder
from blendkv.errors import BlendKVError, InputError
from blendkv.eval.bench.process import MeasuringProcess, engine_environment
from blendkv.eval.bench.ttft import QUESTION, real_chunks
from blendkv.eval.fidelity import Fidelity
from blendkv.eval.rows import ModeSamples, percentiles_ms
from blendkv.prompt import PromptBuilder
from blendkv.types import Prompt, TokenIds

MODES = ("full", "reuse", "blend:strided@0.03", "blend:head_query@0.05")
MISS = "blend:head_query@0.05"
"""What requests ask for whose chunks are not stored."""
ENGINE = "blendkv.eval.bench.vllm_measured"
"""Module of the measured engine's process."""
_SPOKEN = 8
"""Continuation tokens that move into the prompt when plain vLLM is compared with itself."""
_RED = {"float32": 1e-5}
_RED_HALF = 0.05
"""KL in nats above which an oracle is red: rounding of half precision is about .005, garbage KV gives more than 1."""
_ROOM = 64
KV_BYTES = 2 << 30
"""Room for vLLM's pages on a CPU."""
_STAGES = ("score", "load", "rotate", "recompute")


@dataclass(frozen=True)
class VllmTtftSettings:
    """Size and length of a run. ``tokens`` are chunk tokens per prompt; ``memory_share`` is each engine's of a GPU."""

    tokens: Sequence[int] = (2000, 4000)
    chunk_tokens: int = 400
    repeats: int = 5
    threads: int = 1
    modes: Sequence[str] = MODES
    eager: bool = True
    memory_share: float | None = None

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "repeats", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is allowed")
        if not (self.modes and self.tokens):
            raise InputError("no mode, or no number of tokens, is given; name at least one of each")
        if min(self.tokens) < self.chunk_tokens:
            raise InputError(
                f"tokens {min(self.tokens)} are less than a chunk of {self.chunk_tokens}: give at least one"
            )
        for spec in self.modes:
            parse_mode(spec)


@dataclass(frozen=True)
class Oracles:
    """What must hold before a figure is given, as KL to plain vLLM in nats; see `check`."""

    noise: float
    budget_one: float
    own_place: float
    garbage: float
    red: float

    @property
    def failures(self) -> list[str]:
        """One line per oracle that is red."""
        lines = []
        if not self.budget_one <= self.red:
            lines.append(f"budget 1 differs from plain vLLM: KL {self.budget_one:.2g}, allowed {self.red:g}")
        if not self.own_place <= self.red:
            lines.append(f"a chunk in its own place differs: KL {self.own_place:.2g}, allowed {self.red:g}")
        if not self.garbage > self.red:
            lines.append(f"garbage KV goes unnoticed: KL {self.garbage:.2g}; the pages do not hold what is stored")
        return lines


@dataclass
class ConnectorCost:
    """TTFT of requests that are not blended, over that of an engine without the connector, round by round.

    ``ours`` and ``theirs`` hold (seconds, seconds of CPU) per round; the ratio of the latter does not depend on who
    else is on the machine.
    """

    tokens: int
    request: str
    ours: list[tuple[float, float]] = field(default_factory=list)
    theirs: list[tuple[float, float]] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """JSON values."""
        ours, theirs = np.asarray(self.ours), np.asarray(self.theirs)
        ratio, cpu = (
            {
                f"p{p}": round(float(v), 4)
                for p, v in zip((20, 50, 80), np.percentile(ratios, (20, 50, 80)), strict=True)
            }
            for ratios in (ours / theirs).T
        )
        return {
            "tokens": self.tokens, "request": self.request, "rounds": len(ours), "ratio": ratio, "cpu_ratio": cpu,
            "ttft_ms": percentiles_ms(ours[:, 0].tolist()), "without_ms": percentiles_ms(theirs[:, 0].tolist()),
        }  # fmt: skip


@dataclass
class VllmTtftResult:
    """Rows per (size, mode), the oracles per size, the connector's cost, its seconds per call in the scheduler."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    oracles: list[Oracles] = field(default_factory=list)
    costs: list[ConnectorCost] = field(default_factory=list)
    scheduling: list[float] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        """Why no speed-up is given; empty when all is well."""
        return [line for found in self.oracles for line in found.failures]

    @property
    def scheduler_ms(self) -> dict[str, float] | None:
        """p50 and the longest of the connector's calls in the scheduler, in milliseconds."""
        if not self.scheduling:
            return None
        calls = np.asarray(self.scheduling) * 1e3
        return {"p50": round(float(np.median(calls)), 4), "max": round(float(calls.max()), 4)}


@dataclass
class _Lane:
    """One mode at one size."""

    samples: ModeSamples
    stages: list[dict[str, float]] = field(default_factory=list)
    peak: int | None = None
    ideal: float | None = 1.0


class Case:
    """A prompt of one size, as the engines take it."""

    def __init__(self, builder: PromptBuilder, chunks: Sequence[TokenIds]) -> None:
        self.chunks = [c.tolist() for c in chunks]
        self.prefix = builder.prefix.tolist()
        self.prompt: Prompt = builder.first(chunks, QUESTION)
        self.segments = as_segments(self.prompt)
        self.alone = as_segments(builder.first(chunks[:1], QUESTION))
        self._random = random.Random(0)

    def unseen(self) -> list[list[Any]]:
        """The prompt with the tokens of each chunk in an order that was never seen."""
        return [[kind, self._random.sample(run, len(run)) if kind == "chunk" else run] for kind, run in self.segments]


def as_segments(prompt: Prompt) -> list[list[Any]]:
    """A prompt as measuring processes take it: ``[kind, token ids]`` per segment."""
    return [[s.kind, s.token_ids.tolist()] for s in prompt.segments]


def run_vllm_ttft(
    model: str, dtype: str, settings: VllmTtftSettings, tell: Callable[[str], None] = lambda line: None
) -> VllmTtftResult:
    """Check, then measure every mode in turn, ``repeats`` times round; while an oracle is red, nothing is timed.

    Raises
    ------
    BlendKVError
        If an engine cannot be started, or does not blend what it is asked to.
    """
    folder = resolve_folder(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    builder = PromptBuilder(tokenizer)
    counts = [tokens // settings.chunk_tokens for tokens in settings.tokens]
    chunks = real_chunks(tokenizer, max(counts), settings.chunk_tokens)
    cases = [Case(builder, chunks[:count]) for count in counts]
    longest = max(len(case.prompt) for case in cases)
    start = {
        "model": str(folder), "dtype": dtype, "max_model_len": longest + _ROOM, "eager": settings.eager,
        "memory_share": settings.memory_share,
    }  # fmt: skip
    result = VllmTtftResult()
    lanes = [[_Lane(ModeSamples(parse_mode(spec))) for spec in settings.modes] for _ in cases]
    with tempfile.TemporaryDirectory() as scratch:
        store = str(Path(scratch) / "store")
        environment = engine_environment(settings.threads, KV_BYTES)
        with MeasuringProcess(ENGINE, environment) as engine:
            tell("correctness: loading vLLM")
            result.engine = engine.call("start", **start, store=store, min_saving=-1.0)
            for case, own in zip(cases, lanes, strict=True):
                tell(f"correctness: {len(case.prompt)} tokens")
                result.oracles.append(check(engine, case, result.engine["dtype"]))
                for lane in own if not result.failures else ():
                    _prepare(engine, case, lane)
        if not result.failures:
            _take_turns(start, store, environment, cases, lanes, settings.repeats, result, tell)
    for case, own in zip(cases, lanes, strict=True):
        full = next((lane.samples for lane in own if lane.samples.mode.settings is None), None)
        result.rows += [_row(lane, full, len(case.prompt)) for lane in own]
    return result


def _take_turns(
    start: dict[str, Any],
    store: str,
    environment: dict[str, str],
    cases: Sequence[Case],
    lanes: Sequence[Sequence[_Lane]],
    repeats: int,
    result: VllmTtftResult,
    tell: Callable[[str], None],
) -> None:
    """Time an engine with the connector, as users configure it, and one without."""
    with ExitStack() as stack:
        blending, plain = (stack.enter_context(MeasuringProcess(ENGINE, environment)) for _ in range(2))
        tell("loading vLLM with and without the connector")
        blending.call("start", **start, store=store)
        plain.call("start", **start)
        for case, own in zip(cases, lanes, strict=True):
            _measure(blending, plain, case, own, repeats, result, tell)


def check(engine: MeasuringProcess, case: Case, dtype: str) -> Oracles:
    """The oracles, on plain vLLM's own continuation.

    Budget 1 is plain vLLM. One chunk behind its own system prefix is exact without any recomputation; with garbage in
    the chunk's place it must not be, else the pages do not hold what the store does. ``noise`` is plain vLLM against
    itself with a part of the continuation prefilled.
    """
    precompute(engine, case)
    engine.call("reference", segments=case.alone)
    own_place = engine.call("fidelity", segments=case.alone, mode="reuse")
    engine.call("spoil", prefix=case.prefix, chunk=case.chunks[0])
    garbage = engine.call("fidelity", segments=case.alone, mode="reuse")
    engine.call("restore", prefix=case.prefix, chunk=case.chunks[0])
    engine.call("reference", segments=case.segments)
    noise = engine.call("fidelity", segments=case.segments, mode=None, spoken=_SPOKEN)
    budget_one = engine.call("fidelity", segments=case.segments, mode="blend:strided@1")
    for found in (own_place, garbage, budget_one):
        _blended(found)
    return Oracles(noise["kl"], budget_one["kl"], own_place["kl"], garbage["kl"], _RED.get(dtype, _RED_HALF))


def precompute(engine: MeasuringProcess, case: Case) -> None:
    """Fill the store with the chunks of a case."""
    held = engine.call("precompute", prefix=case.prefix, chunks=case.chunks)
    if held != len(case.chunks):
        raise BlendKVError(f"the store holds {held} of {len(case.chunks)} chunks after they were computed")


def _blended(answer: dict[str, Any]) -> dict[str, Any]:
    """The connector's account of a request that must have been blended."""
    told = answer["told"] or {}
    if told.get("outcome") != "blended":
        raise BlendKVError(f"vLLM did not blend a request that asks for it: {told.get('reason', 'no connector')}")
    return told


def _summary(told: dict[str, Any]) -> BlendSummary:
    return BlendSummary(**{name: value for name, value in told.items() if name in BlendSummary.__dataclass_fields__})


def _prepare(engine: MeasuringProcess, case: Case, lane: _Lane) -> None:
    """Fidelity, memory and the ideal of one lane."""
    mode = lane.samples.mode
    if mode.settings is None:
        found = engine.call("fidelity", segments=case.segments, mode=None, spoken=_SPOKEN)
    else:
        found = engine.call("fidelity", segments=case.segments, mode=str(mode))
        lane.ideal = engine.call("ideal", summary=vars(_summary(_blended(found))))
        lane.peak = engine.call("peak", segments=case.segments, mode=str(mode))
    lane.samples.fidelity.append(Fidelity(found["kl"], found["top1"]))


def _measure(
    blending: MeasuringProcess,
    plain: MeasuringProcess,
    case: Case,
    lanes: Sequence[_Lane],
    repeats: int,
    result: VllmTtftResult,
    tell: Callable[[str], None],
) -> None:
    """Round by round: every mode, then the same unseen prompts with and without the connector; one request at a time.

    A warm-up round comes first.
    """
    costs = [ConnectorCost(len(case.prompt), request) for request in ("plain", "miss")]
    for turn in range(repeats + 1):
        tell(f"{len(case.prompt)} tokens, " + (f"round {turn}/{repeats}" if turn else "warm-up"))
        for lane in lanes:
            answer = _first_token(blending, case, lane, timed=turn > 0)
            result.scheduling += answer["scheduling"] if turn else []
        for cost in costs:
            mode = MISS if cost.request == "miss" else None
            ours, theirs = _pair(blending, plain, case.unseen(), mode, turn % 2 == 0)
            if turn:
                cost.ours.append(ours)
                cost.theirs.append(theirs)
    result.costs += costs


def _first_token(engine: MeasuringProcess, case: Case, lane: _Lane, timed: bool) -> dict[str, Any]:
    mode = lane.samples.mode
    answer: dict[str, Any] = engine.call(
        "ask", segments=case.segments, mode=None if mode.settings is None else str(mode)
    )
    if not timed:
        return answer
    lane.samples.ttft.append(answer["seconds"])
    if mode.settings is not None:
        summary = _summary(_blended(answer))
        stages = {name: summary.stages.get(name, 0.0) for name in _STAGES}
        lane.stages.append({**stages, "question": answer["seconds"] - sum(stages.values())})
        lane.samples.reports.append(summary)
        lane.samples.bytes_loaded = summary.bytes_loaded
    return answer


def _pair(
    blending: MeasuringProcess, plain: MeasuringProcess, segments: list[list[Any]], mode: str | None, first: bool
) -> tuple[tuple[float, float], tuple[float, float]]:
    """One prompt that is in no store, with the connector and without; ``first`` says who begins."""
    found: dict[str, tuple[float, float]] = {}
    for name in ("ours", "theirs") if first else ("theirs", "ours"):
        engine, asked = (blending, mode) if name == "ours" else (plain, None)
        answer = engine.call("ask", segments=segments, mode=asked)
        if (answer["told"] or {}).get("outcome") == "blended":
            raise BlendKVError("vLLM blended a prompt whose chunks were never stored")
        found[name] = answer["seconds"], answer["cpu_seconds"]
    return found["ours"], found["theirs"]


def _row(lane: _Lane, full: ModeSamples | None, tokens: int) -> dict[str, Any]:
    names = (*_STAGES, "question")
    stages = {
        name: round(float(np.median([s[name] for s in lane.stages])) * 1e3, 3) if lane.stages else None
        for name in names
    }
    return {
        **lane.samples.row(full), "engine": "vllm", "tokens": tokens,
        "tier": "memory" if lane.stages else None,
        "ideal_speedup": None if lane.ideal is None else round(lane.ideal, 2),
        "stages_ms": stages, "peak_extra_bytes": lane.peak,
    }  # fmt: skip
