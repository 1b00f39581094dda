"""`VllmEngine` under `RagPipeline`, on a real vLLM with processes of its own: one engine for the module."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import psutil
import pytest
import vllm_engine  # noqa: F401  vLLM, or a skip
from tiny_hub import SYSTEM, TOPICS, BagEmbedder, save_model, write_corpus

from blendkv.blend import parse_mode
from blendkv.engines.base import GenerationOptions
from blendkv.engines.torch.engine import TorchEngine
from blendkv.engines.vllm.engine import VllmEngine
from blendkv.errors import InputError, PromptTooLongError
from blendkv.pipeline import RagPipeline
from blendkv.retrieval.adapt import CallableRetriever
from blendkv.retrieval.collection import Collection
from blendkv.store.tiered import KVStore

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]

CONTEXT = 1024
QUESTION = "What does the nonlocal statement do?"
PASSAGES = {name: text * 2 for name, text in list(TOPICS.items())[:5]}
TURNS = {"What?": ["lambda", "scope"], "And then?": ["scope", "with"], "Why?": ["with", "lambda"]}
SOME = GenerationOptions(max_new_tokens=10)
LONG = GenerationOptions(max_new_tokens=300)
EVERYTHING = "blend:head_query@1"


def retrieve(query, k):
    """Passages by question, without an index: bm25s would load numba, behind which no further vLLM starts."""
    return [PASSAGES[t] if t in PASSAGES else TOPICS[t] for t in TURNS.get(query, list(PASSAGES)[:k])]


def pipeline_over(engine, folder, **options):
    options = {"system": SYSTEM, "top_k": 3, **options}
    store = KVStore.open(folder, memory_bytes=1 << 24)
    return RagPipeline(engine, store, CallableRetriever(retrieve, engine.tokenizer), **options)


def children():
    """Ids of this process's descendants, zombies too; multiprocessing's own resource tracker stays for good."""
    found = psutil.Process().children(recursive=True)
    return {p.pid for p in found if p.is_running() and not any("resource_tracker" in word for word in p.cmdline())}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "llama", head_dim=32, hidden_size=128)


@pytest.fixture(scope="module")
def embedded(model):
    return TorchEngine.load(str(model))


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    """Blends whatever it is asked to, worth it or not; afterwards its processes are gone."""
    before = children()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        with VllmEngine.load(
            str(model), store=tmp_path_factory.mktemp("kv") / "store", max_model_len=CONTEXT, enforce_eager=True,
            connector={"min_saving": -1},
        ) as made:  # fmt: skip
            started = children() - before
            assert len(started) >= 2, "the engine core and a worker"
            yield made
        with pytest.raises(InputError, match="engine is closed"):
            made.rpc("blendkv_describe")
    assert children() & started == set()


@pytest.fixture(scope="module")
def rag(engine):
    with pipeline_over(engine, engine.store) as pipeline:
        yield pipeline


def idle(engine):
    """Wait until vLLM has nothing to do; True if it comes to that."""
    for _ in range(400):
        if engine.llm.get_num_unfinished_requests() == 0:
            return True
        time.sleep(0.05)
    return False


def test_what_is_known_of_the_model(engine, embedded):
    assert engine.unsupported is None
    assert (engine.dtype, engine.context) == (embedded.dtype, CONTEXT)
    for name in ("fingerprint", "name", "kv_bytes_per_token", "bos_token_id", "eos_token_ids"):
        assert getattr(engine, name) == getattr(embedded, name), name


def test_every_mode_answers(rag, embedded, tmp_path):
    """Full prefill and budget 1 as over transformers; below it the very blend that the report describes."""
    with pipeline_over(embedded, tmp_path / "s") as other:
        expected = other.ask(QUESTION, mode="full", options=SOME)
        reference = {mode: other.ask(QUESTION, mode=mode, options=SOME) for mode in ("reuse", "blend:strided@0.3")}
    full = rag.ask(QUESTION, mode="full", options=SOME)
    assert (full.token_ids, full.text, full.mode) == (expected.token_ids, expected.text, "full")
    assert set(full.timings) == {"retrieve", "prepare", "question", "ttft", "total"}
    assert full.prompt_tokens == expected.prompt_tokens
    for _ in range(2):  # the chunks are missing, then stored
        exact = rag.ask(QUESTION, mode=EVERYTHING, options=SOME)
        assert (exact.token_ids, exact.text, exact.mode) == (expected.token_ids, expected.text, EVERYTHING)
        assert (exact.fallback, exact.finish_reason) == (None, expected.finish_reason)
    for mode, theirs in reference.items():
        mine = rag.ask(QUESTION, mode=mode, options=SOME)
        report = mine.blend_report
        assert (mine.mode, mine.token_ids[0]) == (mode, theirs.token_ids[0])
        assert report.reusable_tokens == theirs.blend_report.reusable_tokens
        assert report.recomputed_tokens == theirs.blend_report.recomputed_tokens
        assert report.total_tokens == mine.prompt_tokens - 1  # vLLM runs the last token itself
        assert set(report.stages) < set(mine.timings)
    assert reference["reuse"].token_ids != expected.token_ids, "the blend changes nothing: this test could not fail"


def test_stream_and_options(rag):
    stream = rag.stream(QUESTION, mode="reuse", options=SOME)
    pieces = list(stream)
    whole = rag.ask(QUESTION, mode="reuse", options=SOME)
    assert "".join(pieces) == stream.answer.text == whole.text
    assert len(pieces) > 1
    assert stream.answer.token_ids == whole.token_ids
    text = whole.text.replace("\N{REPLACEMENT CHARACTER}", "\0")
    stop = next(text[i : i + 2] for i in range(2, len(text)) if "\0" not in text[i : i + 2])
    cut = rag.ask(QUESTION, mode="reuse", options=GenerationOptions(max_new_tokens=10, stop=(stop,)))
    assert (cut.text, cut.finish_reason) == (whole.text[: text.index(stop)], "stop")
    sampled = [
        rag.ask(QUESTION, mode="reuse", options=GenerationOptions(max_new_tokens=10, temperature=2.0, seed=s)).token_ids
        for s in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_stream_that_is_left_is_aborted(rag, engine):
    stream = rag.stream(QUESTION, options=LONG)
    pieces = iter(stream)
    first = next(pieces)
    assert engine.llm.get_num_unfinished_requests() == 1
    pieces.close()
    assert idle(engine)
    answer = stream.answer
    assert answer.finish_reason == "cancelled"
    assert answer.text.startswith(first)
    assert answer.completion_tokens < 300
    assert rag.ask(QUESTION, mode="reuse", options=SOME).finish_reason in ("length", "stop")


def test_many_at_once(rag, engine):
    """All are in flight together, and each gets the answer that it gets alone."""
    modes = ["full", "reuse", EVERYTHING, "blend:strided@0.3"] * 2
    alone = [rag.ask(QUESTION, mode=mode, options=SOME).token_ids for mode in modes]

    async def ask_all():
        return await asyncio.gather(*(rag.aask(QUESTION, mode=mode, options=SOME) for mode in modes))

    assert [a.token_ids for a in asyncio.run(ask_all())] == alone

    async def read_three():
        streams = [rag.stream(QUESTION, mode=mode, options=LONG) for mode in modes[:3]]
        readers = [aiter(s) for s in streams]
        await asyncio.gather(*(anext(r) for r in readers))
        together = engine.llm.get_num_unfinished_requests()
        await asyncio.gather(*(r.aclose() for r in readers))
        return together, [s.answer.finish_reason for s in streams]

    assert asyncio.run(read_three()) == (3, ["cancelled"] * 3)
    assert idle(engine)


def test_asynchronous_stream(rag):
    async def read():
        return [piece async for piece in rag.astream(QUESTION, mode="reuse", options=SOME)]

    async def leave():
        async with aclosing(rag.astream(QUESTION, options=LONG)) as pieces:
            async for piece in pieces:
                return piece

    assert "".join(asyncio.run(read())) == rag.ask(QUESTION, mode="reuse", options=SOME).text
    assert asyncio.run(leave())
    assert idle(rag.engine)


def test_chat_of_three_turns(rag, monkeypatch):
    """Each turn is the whole conversation asked at once; blended at budget 1 it is full prefill."""
    own, prompts = rag.engine.generate, []

    def noted(prompt, *rest):
        prompts.append(prompt)
        return own(prompt, *rest)

    monkeypatch.setattr(rag.engine, "generate", noted)
    answers = {}
    for mode in ("full", EVERYTHING, "reuse"):
        session = rag.chat(mode=mode)
        answers[mode] = [session.ask(question, SOME) for question in TURNS]
    assert [a.token_ids for a in answers[EVERYTHING]] == [a.token_ids for a in answers["full"]]
    assert [a.mode for a in answers[EVERYTHING]] == [EVERYTHING] * 3
    assert [a.token_ids for a in answers["reuse"]] != [a.token_ids for a in answers["full"]]
    for prompt, answer in zip(prompts[3:6], answers[EVERYTHING], strict=True):
        alone = rag.answer(prompt, parse_mode("full"), (), SOME).answer
        assert (alone.token_ids, alone.prompt_tokens) == (answer.token_ids, answer.prompt_tokens)
    assert [[s.kind for s in p.segments].count("chunk") for p in prompts[3:6]] == [2, 3, 3]


def ingested(engine, folder, corpus):
    """K and V by chunk key that an ingest leaves, and the chunks' token ids; a second run has nothing to do."""
    with KVStore.open(folder, memory_bytes=0):  # a collection alone is no store
        collection = Collection(folder)
    steps = []
    with pipeline_over(engine, folder, collection=collection, embedder=BagEmbedder()) as pipeline:
        report = pipeline.ingest([corpus], chunk_tokens=48, progress=lambda *step: steps.append(step))
        assert ("kv", report.kv_tokens, report.kv_tokens) == steps[-1]
        wanted = [chunk.token_ids for chunk in collection.chunks()]
        again = pipeline.ingest([corpus], chunk_tokens=48)
        assert (again.kv_computed, again.kv_tokens) == (0, 0)
        found = {}
        for ids in wanted:
            key = pipeline.library.key(ids)
            reader = pipeline.store.get(key, ids)
            found[key] = [reader.layer(i) for i in range(reader.layers)]
    return found, wanted


def test_ingest_computes_where_the_model_is(engine, embedded, tmp_path):
    """The same chunk KVs as the embedded engine's, under the same keys; again, nothing; reopened, they are blended."""
    corpus = write_corpus(tmp_path / "corpus")
    mine, wanted = ingested(engine, engine.store, corpus)
    theirs, _ = ingested(embedded, tmp_path / "theirs", corpus)
    assert mine.keys() == theirs.keys()
    for key, kv in mine.items():
        for (k, v), (other_k, other_v) in zip(kv, theirs[key], strict=True):
            assert (k - other_k).abs().max() < 1e-3
            assert (v - other_v).abs().max() < 1e-3
    with pipeline_over(engine, engine.store) as reopened:
        assert reopened.library.precompute(wanted, None) == 0
        assert reopened.library.counts.computed == 0


def test_chunks_of_the_other_recipe(engine):
    with pipeline_over(engine, engine.store, recipe="bos") as pipeline:
        prompt = pipeline.prompts.first([s.chunk.token_ids for s in pipeline.retriever.retrieve(QUESTION, 2)], QUESTION)
        chunks = [s.token_ids for s in prompt.segments if s.kind == "chunk"]
        pipeline.library.precompute(chunks, None)
        assert all(pipeline.library.has(ids) for ids in chunks)
        assert {row.recipe for row in pipeline.store.ls() if row.recipe.kind == "bos"} == {pipeline.library.recipe}
        full = pipeline.ask(QUESTION, mode="full", options=SOME)
        assert pipeline.ask(QUESTION, mode=EVERYTHING, options=SOME).token_ids == full.token_ids


def test_what_is_refused(rag, engine, tmp_path):
    with pytest.raises(PromptTooLongError, match=f"holds {CONTEXT}"):
        rag.ask("word " * CONTEXT)
    with KVStore.open(tmp_path / "other", memory_bytes=0) as other, pytest.raises(InputError, match="engine per store"):
        engine.library(other, "system", rag.prompts.prefix)


def test_a_budget_that_cannot_be_kept_is_a_full_prefill(rag):
    """What the embedded engine refuses, the connector finds out too late to refuse: it is counted, and said."""
    mode = "blend:kv_deviation@0.01"
    full = rag.ask(QUESTION, mode="full", options=SOME)
    answer = rag.ask(QUESTION, mode=mode, options=SOME)
    assert (answer.token_ids, answer.mode, answer.blend_report) == (full.token_ids, "full", None)
    assert answer.fallback
    assert rag.fallbacks[answer.fallback] == 1


def test_an_engine_that_is_attached(engine, rag):
    """On a loop of the caller's, as under an HTTP server: blocking calls from threads, asynchronous ones on it."""

    async def serve():
        from vllm import AsyncEngineArgs

        AsyncEngineArgs(**VllmEngine.arguments(engine.name, store=engine.store))
        return await VllmEngine.attach(engine.llm, model=engine.name, store=engine.store)

    attached = engine._loop.call(serve())
    expected = rag.ask(QUESTION, mode="reuse", options=SOME).token_ids
    with pipeline_over(attached, engine.store) as pipeline:

        async def ask():
            stream = pipeline.stream(QUESTION, mode="reuse", options=SOME)
            with pytest.raises(InputError, match="event loop"):
                pipeline.engine.rpc("blendkv_describe")
            async for _ in stream:
                pass
            return stream.answer.token_ids

        assert engine._loop.call(ask()) == expected
        assert pipeline.ask(QUESTION, mode="reuse", options=SOME).token_ids == expected
    attached.close()
    assert rag.ask(QUESTION, mode="reuse", options=SOME).token_ids == expected


def test_chunks_that_were_missing_are_computed_when_there_is_time(model, tmp_path, monkeypatch):
    """The first question is prefilled, at no extra cost; an idle engine computes its chunks; later ones are blended."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    load = {"store": tmp_path / "kv", "max_model_len": CONTEXT, "enforce_eager": True}
    with VllmEngine.load(str(model), **load) as made, pipeline_over(made, made.store) as rag:
        first = rag.ask(QUESTION, mode="blend:strided@0.1", options=SOME)
        assert (first.mode, first.fallback) == ("full", "nothing_stored")
        chunks = [source.chunk.token_ids for source in first.sources]
        assert idle(made)
        for _ in range(600):
            if all(rag.library.has(ids) for ids in chunks):
                break
            time.sleep(0.1)
        assert all(rag.library.has(ids) for ids in chunks)
        later = rag.ask("Which statement is it?", mode="blend:strided@0.1", options=SOME)
        assert later.mode == "blend:strided@0.1"
        assert later.blend_report.reusable_tokens == sum(len(ids) for ids in chunks)
