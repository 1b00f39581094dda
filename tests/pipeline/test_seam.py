"""The pipeline asks an engine for no more than the `Engine` protocol, and passes on what that says it did."""

from __future__ import annotations

import pytest
from tiny_hub import SYSTEM, TOPICS

from blendkv.blend import BlendSummary
from blendkv.engines.base import Conversation, Outcome
from blendkv.engines.generation import End, Generation
from blendkv.errors import PromptTooLongError
from blendkv.library import Library
from blendkv.pipeline import RagPipeline
from blendkv.retrieval.adapt import CallableRetriever
from blendkv.store.tiered import KVStore

STAGES = {"score": 0.1, "load": 0.2, "rotate": 0.0, "recompute": 0.3}
REPORT = BlendSummary("strided", "js", 0.3, 0.29, 9, 4, 1, 4, 1, 0, 128, STAGES)


class Echo(Generation):
    """Says one word."""

    def _start(self, put):
        self.tokens.append(7)
        put("word")
        put(End("stop"))

    def cancel(self):
        pass

    def _join(self):
        pass


class Names(Library):
    bytes_per_token = 1

    def fill(self, chunks):
        for chunk in chunks:
            self.filled = [*getattr(self, "filled", []), chunk.tobytes()]
            yield len(chunk)


class EchoEngine:
    """Nothing but the protocol."""

    name, fingerprint, dtype, bos_token_id, unsupported = "echo", "e" * 32, "float32", 1, None
    kv_bytes_per_token, context, eos_token_ids = 1, 500, frozenset({2})

    def __init__(self, tokenizer):
        self.tokenizer, self.asked, self.outcome = tokenizer, [], Outcome("full", seconds={"prepare": 0.0})

    def library(self, store, kind, system_prefix, codec=None, tenant=""):
        return Names(self, store, kind, system_prefix, codec or "raw")

    def conversation(self):
        return Conversation()

    def generate(self, prompt, mode, library, options, conversation=None):
        self.asked.append((prompt, mode, conversation))
        return Echo(self.outcome)

    def close(self):
        pass


@pytest.fixture
def pipeline(llama):
    retriever = CallableRetriever(lambda query, k: [TOPICS[t] for t in ("lambda", "scope")][:k], llama.tokenizer)
    engine = EchoEngine(llama.tokenizer)
    with RagPipeline(engine, KVStore.open(None, memory_bytes=1 << 20), retriever, system=SYSTEM) as made:
        yield made


def test_what_was_done_is_passed_on(pipeline):
    pipeline.engine.outcome = Outcome("blend:strided@0.3", REPORT, None, (), {"prepare": 0.01, **STAGES})
    answer = pipeline.ask("What?", mode="blend:strided@0.3")
    assert (answer.text, answer.token_ids, answer.mode, answer.finish_reason) == (
        "word",
        (7,),
        "blend:strided@0.3",
        "stop",
    )
    assert (answer.blend_report, answer.fallback, pipeline.fallbacks) == (REPORT, None, {})
    assert set(answer.timings) == {"retrieve", "prepare", *STAGES, "question", "ttft", "total"}
    assert answer.timings["question"] >= 0


def test_fallbacks_are_counted_and_said_once(pipeline, caplog):
    pipeline.engine.outcome = Outcome("full", None, "little_stored", ("little_stored",), {"prepare": 0.0})
    for _ in range(3):
        answer = pipeline.ask("What?")
        assert (answer.mode, answer.fallback, answer.blend_report) == ("full", "little_stored", None)
    assert pipeline.fallbacks == {"little_stored": 3}
    assert len([r for r in caplog.records if "little_stored" in r.getMessage()]) == 1
    pipeline.engine.outcome = Outcome("prefix", None, "prefix", ("prefix",), {"prepare": 0.0})
    assert pipeline.ask("What?").mode == "prefix"
    assert pipeline.fallbacks == {"little_stored": 3, "prefix": 1}
    assert len(caplog.records) == 1  # a prefix cache that serves is nothing to warn of


def test_a_conversation_sends_the_whole_of_it(pipeline):
    session = pipeline.chat()
    for question in ("What?", "And?", "Why?"):
        session.ask(question)
    (first, _, mine), (second, _, also), (third, _, again) = pipeline.engine.asked
    assert mine is also is again
    for shorter, longer in ((first, second), (second, third)):
        said = [*shorter.token_ids.tolist(), 7]
        assert longer.token_ids[: len(said)].tolist() == said
    kinds = [s.kind for s in third.segments]
    assert (kinds.count("system"), kinds.count("chunk"), kinds.count("query"), kinds[-1]) == (1, 2, 1, "query")
    pipeline.chat().ask("What?")
    assert pipeline.engine.asked[-1][2] is not mine


def test_too_long_prompts_do_not_reach_the_engine(pipeline):
    with pytest.raises(PromptTooLongError, match="the context of echo holds 500"):
        pipeline.ask("word " * 500)
    assert pipeline.engine.asked == []


def test_a_library_fills_what_is_missing(pipeline):
    chunks = [s.chunk.token_ids for s in pipeline.retriever.retrieve("What?", 2)]
    steps = []
    left = pipeline.library.precompute([*chunks, chunks[0]], len(chunks[0]), lambda *step: steps.append(step))
    assert left == 1
    assert pipeline.library.filled == [chunks[0].tobytes()]
    assert steps == [(len(chunks[0]), len(chunks[0]))]
