"""Questions: every mode, every odd set of chunks, and what happens when things are broken or do not fit."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tiny_hub import CONTEXT, SYSTEM, TOPICS, open_pipeline, write_corpus

from blendkv.blend import SELECTORS
from blendkv.engines.base import GenerationOptions
from blendkv.errors import DamagedChunkError, InputError, PromptTooLongError, StoreError, UnsupportedModelError
from blendkv.pipeline import RagPipeline
from blendkv.retrieval.adapt import CallableRetriever
from blendkv.retrieval.retriever import RetrievedChunk
from blendkv.retrieval.split import Splitter
from blendkv.store.tiered import KVStore
from blendkv.types import Document

QUESTION = "What does the nonlocal statement do?"
MEDIUM = GenerationOptions(max_new_tokens=48)
SHORT = GenerationOptions(max_new_tokens=12)
EVERYTHING = "blend:head_query@1"
PASSAGES = [text * 2 for text in TOPICS.values()]


def over_passages(engine, passages, store=None, **options):
    """A pipeline whose retriever returns ``passages`` whatever the question."""
    options = {"system": SYSTEM, "top_k": len(passages) or 1, **options}
    retriever = CallableRetriever(lambda query, k: passages, engine.tokenizer)
    return RagPipeline(engine, store or KVStore.open(None, memory_bytes=1 << 30), retriever, **options)


@pytest.fixture(scope="module")
def filled(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("filled")
    with open_pipeline(folder / "store", llama) as pipeline:
        pipeline.ingest([write_corpus(folder / "corpus")], chunk_tokens=48)
        yield pipeline


@pytest.mark.parametrize("mode", ["full", "reuse", *(f"blend:{name}@0.5" for name in SELECTORS.names())])
def test_every_mode_answers(filled, mode):
    answer = filled.ask(QUESTION, mode=mode, options=SHORT)
    assert answer.mode == mode
    assert answer.fallback is None
    assert answer.completion_tokens == len(answer.token_ids) > 0
    assert len(answer.sources) == 3
    stages = {"retrieve", "prepare", "question", "ttft", "total"}
    blend_stages = set() if mode == "full" else {"score", "load", "rotate", "recompute"}
    assert set(answer.timings) == stages | blend_stages
    assert all(seconds >= 0 for seconds in answer.timings.values())
    parts = sum(v for k, v in answer.timings.items() if k not in ("ttft", "total"))
    assert parts == pytest.approx(answer.timings["ttft"], abs=0.25)  # what stands between the stages
    assert answer.timings["ttft"] <= answer.timings["total"]
    if mode == "full":
        assert answer.blend_report is None
    else:
        report = answer.blend_report
        assert report.total_tokens == answer.prompt_tokens
        assert report.budget_spent <= report.budget_asked + 1e-9
        assert report.recomputed_tokens == 0 if mode == "reuse" else report.recomputed_tokens > 0


@pytest.mark.parametrize("recipe", ["system", "bos"])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_budget_one_is_full_prefill(request, name, recipe):
    engine = request.getfixturevalue(name)
    differs = False
    for passages in (PASSAGES[:1], PASSAGES[::-1], [PASSAGES[2], *PASSAGES[:2]]):
        with over_passages(engine, passages, recipe=recipe) as pipeline:
            full = pipeline.ask(QUESTION, mode="full", options=MEDIUM)
            for _ in range(2):  # missing, then found
                blended = pipeline.ask(QUESTION, mode=EVERYTHING, options=MEDIUM)
                assert blended.token_ids == full.token_ids
                assert blended.text == full.text
            differs |= pipeline.ask(QUESTION, mode="reuse", options=MEDIUM).token_ids != full.token_ids
    assert differs, "reuse gives the same answers, so this test could not fail"


def test_nothing_is_retrieved(llama):
    with over_passages(llama, []) as pipeline:
        full, blended = (pipeline.ask(QUESTION, mode=mode, options=SHORT) for mode in ("full", "blend"))
    assert blended.sources == ()
    assert blended.token_ids == full.token_ids  # the system segment is exact
    assert blended.blend_report.reusable_tokens == 0


def test_one_chunk_behind_the_system_prefix_is_exact(llama):
    with over_passages(llama, PASSAGES[3:4]) as pipeline:
        full, reuse = (pipeline.ask(QUESTION, mode=mode, options=MEDIUM) for mode in ("full", "reuse"))
    assert reuse.token_ids == full.token_ids


def test_few_selected_tokens(llama):
    with over_passages(llama, PASSAGES[:3]) as pipeline:
        for budget in ("0.005", "0.02", "0.1"):
            answer = pipeline.ask(QUESTION, mode=f"blend:head_query@{budget}", options=SHORT)
            assert answer.blend_report.recomputed_tokens < 32


def test_hits_and_misses_give_one_answer(llama, tmp_path):
    """All missing, some missing, none missing, and read from disk after a restart: the very same tokens."""
    passages = PASSAGES[:4]
    with over_passages(llama, passages) as pipeline:
        expected = pipeline.ask(QUESTION, options=SHORT)
        assert (pipeline.library.counts.hits, pipeline.library.counts.computed) == (0, 4)
    with over_passages(llama, passages[1:3], KVStore.open(tmp_path, memory_bytes=1 << 30)) as pipeline:
        pipeline.ask("Something else?")
    with over_passages(llama, passages, KVStore.open(tmp_path, memory_bytes=0)) as pipeline:
        assert pipeline.ask(QUESTION, options=SHORT).token_ids == expected.token_ids
        assert (pipeline.library.counts.hits, pipeline.library.counts.computed) == (2, 2)
        pipeline.store.flush()
        assert pipeline.ask(QUESTION, options=SHORT).token_ids == expected.token_ids
        assert (pipeline.library.counts.hits, pipeline.library.counts.computed) == (6, 2)
    with over_passages(llama, passages, KVStore.open(tmp_path, memory_bytes=1 << 30)) as pipeline:
        for _ in range(2):
            assert pipeline.ask(QUESTION, options=SHORT).token_ids == expected.token_ids
        assert (pipeline.library.counts.hits, pipeline.library.counts.computed) == (8, 0)


def test_repeated_chunks_are_computed_once(llama):
    twins = [Document(name, PASSAGES[0]) for name in ("a", "b", "c")]
    chunks = [chunk for document in twins for chunk in Splitter(llama.tokenizer).split(document)]

    class Same:
        def retrieve(self, query, k, where=None):
            return [RetrievedChunk(chunk, 1.0) for chunk in chunks[:k]]

    with RagPipeline(llama, KVStore.open(None, memory_bytes=1 << 30), Same(), system=SYSTEM) as pipeline:
        full = pipeline.ask(QUESTION, mode="full", options=SHORT)
        assert pipeline.ask(QUESTION, mode=EVERYTHING, options=SHORT).token_ids == full.token_ids
        assert pipeline.library.counts.computed == 1
        assert [s.chunk.document_id for s in full.sources] == ["a", "b", "c"]
        with pytest.raises(InputError, match="no collection"):
            pipeline.ingest(["x"])
        assert pipeline.documents == 0


def test_both_recipes_live_in_one_store(llama, tmp_path):
    answers = {}
    for recipe in ("system", "bos"):
        with over_passages(llama, PASSAGES[:3], KVStore.open(tmp_path, memory_bytes=0), recipe=recipe) as pipeline:
            answers[recipe] = pipeline.ask(QUESTION, mode="reuse", options=SHORT).token_ids
            assert pipeline.library.counts.computed == 3
    for recipe in ("bos", "system"):
        with over_passages(llama, PASSAGES[:3], KVStore.open(tmp_path, memory_bytes=0), recipe=recipe) as pipeline:
            assert pipeline.ask(QUESTION, mode="reuse", options=SHORT).token_ids == answers[recipe]
            assert pipeline.library.counts.computed == 0
            kinds = [row.recipe.kind for row in pipeline.store.ls() if row.recipe != pipeline.library.start]
            assert sorted(kinds) == ["bos"] * 3 + ["system"] * 3
            with over_passages(llama, PASSAGES[:3], pipeline.store, recipe=recipe, system="Be kind.") as other:
                other.ask(QUESTION, mode="reuse", options=SHORT)
                # The recipe bos does not depend on the system message; the recipe system does.
                assert other.library.counts.computed == (0 if recipe == "bos" else 3)


def test_an_unsupported_model_is_prefilled_in_full(gpt2, caplog):
    with over_passages(gpt2, PASSAGES[:2]) as pipeline:
        full = pipeline.ask(QUESTION, mode="full", options=SHORT)
        assert full.fallback is None
        for mode in ("blend", "reuse"):
            answer = pipeline.ask(QUESTION, mode=mode, options=SHORT)
            assert answer.token_ids == full.token_ids
            assert "known rotation" in answer.fallback
            assert (answer.mode, answer.blend_report) == ("full", None)
        assert pipeline.fallbacks == {"unsupported model": 2}
        assert pipeline.store.ls() == []
        with pytest.raises(UnsupportedModelError, match="known rotation"):
            _ = pipeline.engine.runner
    assert len([r for r in caplog.records if "cannot be blended" in r.getMessage()]) == 1


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 8
    path.write_bytes(data)


DAMAGE = {
    "flipped values": lambda path: flip(path, -1000),
    "flipped header": lambda path: flip(path, 40),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_under_a_running_pipeline(llama, tmp_path, damage, caplog):
    """Every file in turn, the system prefix's too: the undamaged answer, a count, and a file as it was."""
    with over_passages(llama, PASSAGES[:3], KVStore.open(tmp_path, memory_bytes=0)) as pipeline:
        expected = pipeline.ask(QUESTION, options=SHORT)
        pipeline.store.flush()
        files = sorted(tmp_path.rglob("*.safetensors"))
        whole = {path: path.read_bytes() for path in files}
        assert len(files) == 4
        for number, path in enumerate(files, 1):
            DAMAGE[damage](path)
            assert pipeline.ask(QUESTION, options=SHORT).token_ids == expected.token_ids
            pipeline.store.flush()
            assert sum(pipeline.store.stat().discarded.values()) == number
            assert path.stat().st_size == len(whole[path])
            assert len([r for r in caplog.records if "is damaged" in r.getMessage()]) == number
        assert pipeline.store.verify().damaged == ()
        assert pipeline.ask(QUESTION, options=SHORT).token_ids == expected.token_ids


def test_all_files_damaged_at_once(llama, tmp_path):
    with over_passages(llama, PASSAGES[:4], KVStore.open(tmp_path, memory_bytes=0)) as pipeline:
        expected = pipeline.ask(QUESTION, options=SHORT)
        pipeline.store.flush()
        for path in tmp_path.rglob("*.safetensors"):
            flip(path, -1000)
        assert pipeline.ask(QUESTION, options=SHORT).token_ids == expected.token_ids
        assert pipeline.fallbacks["damaged chunk recomputed"] > 0


def test_damage_without_end_is_prefilled_in_full(llama, monkeypatch, caplog):
    with over_passages(llama, PASSAGES[:2]) as pipeline:
        full = pipeline.ask(QUESTION, mode="full", options=SHORT)

        def damaged(*args, **kwargs):
            raise DamagedChunkError("0" * 64, "checksum")

        monkeypatch.setattr(pipeline.engine, "blend", damaged)
        for _ in range(2):
            answer = pipeline.ask(QUESTION, options=SHORT)
            assert (answer.token_ids, answer.mode) == (full.token_ids, "full")
            assert "check the disk" in answer.fallback
        assert pipeline.fallbacks["damaged again and again"] == 2
    assert caplog.text.count("again and again") == 1


def test_a_damaged_prefix_does_not_stop_an_ingest(llama, tmp_path):
    with over_passages(llama, PASSAGES[:1], KVStore.open(tmp_path, memory_bytes=0)) as pipeline:
        pipeline.ask(QUESTION, options=SHORT)
        pipeline.store.flush()
        prefix = next(row for row in pipeline.store.ls() if row.recipe == pipeline.library.start)
        flip(next(tmp_path.rglob(f"*{prefix.key[4:]}*")), -1000)
        chunk = Splitter(llama.tokenizer).split(Document("x", PASSAGES[1]))[0]
        assert pipeline.library.precompute([chunk.token_ids], None) == 0
        assert pipeline.library.has(chunk.token_ids)


def test_too_long(llama, tmp_path):
    """Numbers and a hint, before anything is computed or stored."""
    with over_passages(llama, PASSAGES[:1]) as pipeline:
        for mode in ("full", "blend"):
            with pytest.raises(PromptTooLongError) as caught:
                pipeline.ask("word " * CONTEXT, mode=mode)
            assert f"holds {CONTEXT}" in str(caught.value)
            assert "in the question" in str(caught.value)
            assert "shorten the question" in str(caught.value)
        assert pipeline.library.counts.computed == 0
    many = [f"{n}: {text}" for n in range(9) for text in PASSAGES]
    with over_passages(llama, many) as pipeline:
        for mode in ("full", "blend"):
            with pytest.raises(PromptTooLongError, match=r"in 63 chunks.*fewer or smaller chunks"):
                pipeline.ask(QUESTION, mode=mode)
        assert pipeline.library.counts.computed == 0
        assert pipeline.ask(QUESTION, k=3, options=SHORT).completion_tokens > 0


def test_the_last_place_of_the_context(llama):
    """One token fits behind a prompt that fills all but one place; none behind one that fills all."""
    with over_passages(llama, PASSAGES[:1]) as pipeline:
        fixed = len(pipeline.prompts.first([pipeline.retriever.retrieve("x", 1)[0].chunk.token_ids], "\x01"))
        for mode in ("full", "blend"):
            answer = pipeline.ask("\x01" * (CONTEXT - fixed), mode=mode)
            assert (answer.prompt_tokens, answer.completion_tokens) == (CONTEXT - 1, 1)
            with pytest.raises(PromptTooLongError, match=f"has {CONTEXT} tokens"):
                pipeline.ask("\x01" * (CONTEXT - fixed + 1), mode=mode)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "fast"}, "unknown mode 'fast'"), ({"mode": "blend:best@0.1"}, "unknown selector 'best'"),
        ({"mode": "blend:strided@1.5"}, r"outside \[0, 1\]"), ({"k": 0}, "at least 1"),
    ],
)  # fmt: skip
def test_wrong_options(filled, options, says):
    with pytest.raises(InputError, match=says):
        filled.ask(QUESTION, **options)
    with pytest.raises(InputError, match="empty"):
        filled.ask("  ")


def test_where(filled):
    answer = filled.ask(QUESTION, where={"title": ["with", "lambda"]}, options=SHORT)
    assert {s.chunk.metadata["title"] for s in answer.sources} == {"with", "lambda"}


@pytest.mark.parametrize("mode", ["full", "blend"])
def test_stream_is_ask(filled, mode):
    stream = filled.stream(QUESTION, mode=mode)
    text = "".join(stream)
    answer = filled.ask(QUESTION, mode=mode)
    assert text == stream.answer.text == answer.text
    assert stream.answer.token_ids == answer.token_ids
    assert stream.answer is stream.answer
    assert list(stream) == []


@pytest.mark.parametrize("how", ["close", "break"])
def test_a_stream_can_be_left(filled, how):
    stream = filled.stream(QUESTION, options=GenerationOptions(max_new_tokens=1500))
    for _ in stream:
        break
    if how == "close":
        stream.close()
    assert not [t for t in threading.enumerate() if t.name == "blendkv-decode"]
    assert stream.answer.finish_reason == "cancelled"
    assert 0 < stream.answer.completion_tokens < 1500
    assert filled.ask(QUESTION, options=SHORT).text


def test_async(filled, tmp_path):
    async def run():
        asked = await asyncio.gather(*(filled.aask(QUESTION, options=SHORT) for _ in range(3)))
        pieces = [piece async for piece in filled.astream(QUESTION, options=SHORT)]
        async for _ in filled.astream(QUESTION, options=GenerationOptions(max_new_tokens=1500)):
            break
        report = await filled.aingest([write_corpus(tmp_path / "more", ["with"])], chunk_tokens=48)
        return asked, pieces, report

    asked, pieces, report = asyncio.run(run())
    assert {a.text for a in asked} == {"".join(pieces)} == {filled.ask(QUESTION, options=SHORT).text}
    assert report.documents.added == 1
    filled.collection.remove_document("more/with.txt")


def test_threads_share_a_pipeline(filled):
    questions = [f"What is a {topic}?" for topic in TOPICS]
    alone = [filled.ask(q, options=SHORT).token_ids for q in questions]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda q: filled.ask(q, options=SHORT).token_ids, questions * 2))
    assert together == alone * 2


def test_a_langchain_retriever(llama):
    from langchain_core.documents import Document as LangchainDocument
    from langchain_core.retrievers import BaseRetriever

    class Shelf(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return [LangchainDocument(page_content=t, metadata={"n": n}) for n, t in enumerate(PASSAGES)]

    langchain_retriever = Shelf()
    retriever = CallableRetriever(lambda query, k: langchain_retriever.invoke(query), llama.tokenizer)
    with RagPipeline(llama, KVStore.open(None, memory_bytes=1 << 30), retriever, system=SYSTEM, top_k=3) as pipeline:
        full, blended = (pipeline.ask(QUESTION, mode=mode, options=SHORT) for mode in ("full", EVERYTHING))
        assert blended.token_ids == full.token_ids
        assert [s.chunk.metadata["n"] for s in blended.sources] == [0, 1, 2]
        pipeline.ask("Another?", options=SHORT)
        assert (pipeline.library.counts.hits, pipeline.library.counts.computed) == (3, 3)


def test_a_full_store_does_not_cost_the_answer(llama, caplog):
    with over_passages(llama, PASSAGES[:2], KVStore.open(None, memory_bytes=10)) as pipeline:
        full = pipeline.ask(QUESTION, mode="full", options=SHORT)
        assert pipeline.ask(QUESTION, mode=EVERYTHING, options=SHORT).token_ids == full.token_ids
    assert pipeline.library.counts.not_stored > 1
    assert sum("not stored" in r.getMessage() for r in caplog.records) == 1


def test_a_store_that_fails_is_a_miss(llama, tmp_path, monkeypatch, caplog):
    """Every look-up fails: the answers are the same, computed anew, counted, and said once."""
    with KVStore.open(tmp_path / "kv", memory_bytes=0) as store:
        pipeline = over_passages(llama, PASSAGES, store)
        wanted = pipeline.ask(QUESTION, mode=EVERYTHING, options=SHORT)

        def failing(*args):
            raise StoreError("the index cannot be read")

        monkeypatch.setattr(store, "get", failing)
        for _ in range(2):
            assert pipeline.ask(QUESTION, mode=EVERYTHING, options=SHORT).text == wanted.text
        assert pipeline.library.counts.failed_lookups >= 2 * len(PASSAGES)
        assert sum("the store fails" in r.getMessage() for r in caplog.records) == 1


def test_token_ids_are_carried(filled):
    """What the model reads are the chunks' own ids, never text tokenised again."""
    answer = filled.ask(QUESTION, options=SHORT)
    prompt = filled.prompts.first([s.chunk.token_ids for s in answer.sources], QUESTION)
    at = len(prompt.segments[0].token_ids)
    for source in answer.sources:
        ids = source.chunk.token_ids
        assert np.array_equal(prompt.token_ids[at : at + len(ids)], ids)
        at += len(ids)
