"""The main job on a real corpus: the Python language reference, answered by full prefill, full reuse and blends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blendkv.blend import parse_mode
from blendkv.engines.base import GenerationOptions
from blendkv.engines.torch.engine import TorchEngine
from blendkv.errors import InputError
from blendkv.eval.fidelity import Fidelity, Reference, blended, noise_floor, reference
from blendkv.eval.rows import ModeSamples
from blendkv.library import ChunkLibrary
from blendkv.pipeline import RagPipeline
from blendkv.retrieval.load import PYTHON_REFERENCE
from blendkv.retrieval.retriever import RetrievedChunk
from blendkv.types import Prompt

MODES = (
    "full",
    "reuse",
    "blend:head_query@0.05",
    "blend:strided@0.03",
    "blend:chunk_head@0.05",
    "blend:kv_deviation@0.15",
)
QUESTIONS = (
    "How does a generator that uses yield from differ from a coroutine that awaits, and what raises StopIteration?",
    "Which special methods does the with statement call, and in what order if the body raises an exception?",
    "How do decorators, default parameter values and annotations of a function definition get evaluated?",
    "What is the difference between a global and a nonlocal statement, and how are names resolved in a class body?",
)
CORPUS = PYTHON_REFERENCE
ANSWER_TOKENS = 40
REPEATS = 3


@dataclass(frozen=True)
class DemoItem:
    """One question with its prompt and what each mode answered, first line only."""

    question: str
    topics: tuple[str, ...]
    prompt_tokens: int
    first_use_seconds: float
    answers: dict[str, str]
    kl: dict[str, float | None]


@dataclass(frozen=True)
class DemoResult:
    """Rows per mode, and the questions."""

    rows: list[dict[str, Any]]
    items: list[DemoItem]


def run_demo(
    pipeline: RagPipeline,
    questions: Sequence[str] = QUESTIONS,
    modes: Sequence[str] = MODES,
    tell: Callable[[str], None] = lambda line: None,
) -> DemoResult:
    """Ask every question in every mode and compare the answers' distributions with full prefill's.

    Chunks whose KV is missing are computed before the clock starts, as first use would, and that time is reported.
    TTFT is from the call to the first token, retrieval included, p50 of `REPEATS` runs per question.
    """
    samples = {spec: ModeSamples(parse_mode(spec)) for spec in modes}
    items = []
    for number, question in enumerate(questions, 1):
        tell(f"question {number}/{len(questions)}: {question}")
        items.append(_one_question(pipeline, question, samples))
    full = samples.get("full")
    return DemoResult([s.row(full) for s in samples.values()], items)


def _one_question(pipeline: RagPipeline, question: str, samples: dict[str, ModeSamples]) -> DemoItem:
    found = pipeline.retriever.retrieve(question, pipeline.top_k)
    prompt = pipeline.prompts.first([s.chunk.token_ids for s in found], question)
    began = time.perf_counter()
    engine, library = _embedded(pipeline)
    library.readers(prompt)
    first_use = time.perf_counter() - began
    truth = reference(engine, prompt)
    answers, kl = {}, {}
    for spec, sample in samples.items():
        answers[spec] = _answer(pipeline, question, spec, sample)
        fidelity = _fidelity(pipeline, prompt, truth, sample)
        sample.fidelity.append(fidelity)
        kl[spec] = fidelity.kl
    topics = tuple(dict.fromkeys(_topic(s) for s in found))
    return DemoItem(question, topics, len(prompt), first_use, answers, dict(kl))


def _answer(pipeline: RagPipeline, question: str, spec: str, sample: ModeSamples) -> str:
    """The first line of the mode's answer; its TTFT and those of further runs go into the sample."""
    answer = pipeline.ask(question, mode=spec, options=GenerationOptions(max_new_tokens=ANSWER_TOKENS))
    sample.ttft.append(answer.timings["ttft"])
    for _ in range(REPEATS - 1):
        again = pipeline.ask(question, mode=spec, options=GenerationOptions(max_new_tokens=1))
        sample.ttft.append(again.timings["ttft"])
    return next(iter(answer.text.strip().splitlines()), "")


def _fidelity(pipeline: RagPipeline, prompt: Prompt, truth: Reference, sample: ModeSamples) -> Fidelity:
    settings = sample.mode.settings
    engine, library = _embedded(pipeline)
    if settings is None:
        return noise_floor(engine, prompt, truth)
    fidelity, report = blended(engine, library, prompt, truth, settings)
    sample.reports.append(report)
    sample.bytes_loaded += report.bytes_loaded
    return fidelity


def _embedded(pipeline: RagPipeline) -> tuple[TorchEngine, ChunkLibrary]:
    """The embedded engine and its library: distributions are compared in this process."""
    if not isinstance(pipeline.engine, TorchEngine) or not isinstance(pipeline.library, ChunkLibrary):
        raise InputError(
            "the demo compares distributions, which needs the embedded engine: open it with engine='torch'"
        )
    return pipeline.engine, pipeline.library


def _topic(found: RetrievedChunk) -> str:
    return str(found.chunk.metadata.get("title") or found.chunk.document_id)
