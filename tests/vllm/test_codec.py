"""Coded chunk KVs inside a real vLLM: the connector finds the store's codec by itself, and blends as the others do."""

from __future__ import annotations

import pytest
import vllm_engine  # noqa: F401  vLLM, or a skip
from tiny_hub import SYSTEM, TOPICS, save_model

from blendkv.engines.base import GenerationOptions, kv_bytes_per_token
from blendkv.engines.torch.engine import TorchEngine
from blendkv.engines.vllm.engine import VllmEngine
from blendkv.errors import InputError
from blendkv.pipeline import RagPipeline
from blendkv.retrieval.adapt import CallableRetriever
from blendkv.retrieval.collection import Collection
from blendkv.store import KVStore

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]

CODEC = "turbo4"
QUESTION = "What does the nonlocal statement do?"
PASSAGES = [text * 2 for text in list(TOPICS.values())[:3]]
SOME = GenerationOptions(max_new_tokens=8)


def pipeline_over(engine, folder, codec=None):
    store = KVStore.open(folder, memory_bytes=1 << 24)
    retriever = CallableRetriever(lambda query, k: PASSAGES[:k], engine.tokenizer)
    return RagPipeline(engine, store, retriever, system=SYSTEM, top_k=3, codec=codec)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model") / "llama", head_dim=32, hidden_size=128)


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kv") / "store"
    KVStore.open(folder, memory_bytes=0).close()
    with Collection(folder) as collection:  # as an ingest with this codec leaves it
        collection.set_meta("codec", CODEC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        with VllmEngine.load(
            str(model), store=folder, max_model_len=1024, enforce_eager=True, connector={"min_saving": -1}
        ) as made:
            yield made


def test_blends_are_those_of_the_embedded_engine(engine, model, tmp_path):
    embedded = TorchEngine.load(str(model))
    assert engine.codec == CODEC
    assert engine.kv_bytes_per_token == embedded.kv_bytes_per_token
    assert engine.stored_bytes_per_token == kv_bytes_per_token(embedded.runner, CODEC)
    with pipeline_over(embedded, tmp_path / "s", CODEC) as other, pipeline_over(engine, engine.store) as rag:
        assert rag.library.recipe == other.library.recipe
        assert rag.library.bytes_per_token == other.library.bytes_per_token
        for mode in ("reuse", "blend:strided@0.3", "reuse"):  # the first computes what the others read
            expected = other.ask(QUESTION, mode=mode, options=SOME)
            answer = rag.ask(QUESTION, mode=mode, options=SOME)
            assert (answer.mode, answer.fallback) == (mode, None)
            assert answer.token_ids == expected.token_ids
        chunks = {row.recipe for row in rag.store.ls() if row.recipe.prefix}
        assert chunks == {rag.library.recipe}
        assert all(rag.library.has(s.token_ids) for s in other.prompts.first(
            [c.chunk.token_ids for c in rag.retriever.retrieve(QUESTION, 3)], QUESTION
        ).segments if s.kind == "chunk")  # fmt: skip


def test_another_codec_than_the_workers(engine):
    with pytest.raises(InputError, match=r"with codec turbo4, asked for raw: load the engine with connector="):
        pipeline_over(engine, engine.store, "raw")
    with pipeline_over(engine, engine.store, CODEC) as rag:
        assert rag.library.recipe.codec == CODEC


def test_heads_that_a_codec_cannot_take(tmp_path):
    """Said when the engine is loaded, not at the first chunk."""
    narrow = save_model(tmp_path / "narrow", head_dim=36, hidden_size=144)
    with pytest.raises(InputError, match=r"codec turbo2 packs 8 values at a time, the head dim is 36"):
        VllmEngine.load(
            str(narrow), store=tmp_path / "s", max_model_len=256, enforce_eager=True, connector={"codec": "turbo2"}
        )
