"""One corpus, one store, several tenants: each computes its own chunk KV, and nobody meets another's."""

from __future__ import annotations

import base64

import pytest
from tiny_hub import SYSTEM, BagEmbedder, write_corpus

from blendkv.errors import InputError, StoreError
from blendkv.pipeline import RagPipeline
from blendkv.store import KVStore
from blendkv.store.quotas import Quotas
from blendkv.tenants import SALT_VARIABLE, tenant_tag
from blendkv.types import as_token_ids

QUESTION = "What is a lambda expression?"
MODE = "blend:strided@0.3"


@pytest.fixture(autouse=True)
def bag(monkeypatch):
    monkeypatch.setattr("blendkv.pipeline.SentenceEmbedder", lambda name: BagEmbedder())


@pytest.fixture(autouse=True)
def salt(monkeypatch):
    monkeypatch.setenv(SALT_VARIABLE, base64.b64encode(bytes(range(32))).decode())


def opened(folder, engine, tenant):
    return RagPipeline.from_store(folder, engine=engine, system=SYSTEM, mode=MODE, top_k=3, tenant=tenant)


def test_answers_are_the_same_and_chunks_are_apart(tmp_path, llama):
    corpus, folder = write_corpus(tmp_path / "corpus"), tmp_path / "s"
    with opened(folder, llama, "acme") as pipeline:
        computed = pipeline.ingest([corpus], chunk_tokens=48).kv_computed
        answers = [pipeline.ask(QUESTION)]
        assert pipeline.library.counts.hits > 0
    with opened(folder, llama, "beta") as pipeline:
        answers.append(pipeline.ask(QUESTION))
        assert pipeline.library.counts.hits == 0
        assert pipeline.library.counts.computed == 3
    with opened(folder, llama, None) as pipeline:
        answers.append(pipeline.ask(QUESTION))
        assert pipeline.library.counts.hits == 0
    assert len({answer.text for answer in answers}) == 1
    assert all(answer.mode == MODE for answer in answers)
    with KVStore.open(folder, memory_bytes=0) as store:
        counts = {use.tag: use.chunks for use in store.stat().tenants}
        # A system prefix each, behind which the chunks were computed.
        assert counts == {tenant_tag("acme"): computed + 1, tenant_tag("beta"): 4, "": 4}
        assert all(info.recipe.tenant in counts for info in store.ls())


def test_a_pipeline_for_each_tenant_over_one_store(tmp_path, llama):
    corpus, folder = write_corpus(tmp_path / "corpus"), tmp_path / "s"
    with opened(folder, llama, None) as pipeline:
        acme, beta = (pipeline.for_tenant(name) for name in ("acme", "beta"))
        computed = acme.ingest([corpus], chunk_tokens=48).kv_computed
        assert computed > 0
        answers = [asked.ask(QUESTION) for asked in (acme, beta, beta)]
        assert len({answer.text for answer in answers}) == 1
        # What happens is counted together: one computes at ingest, the other as it asks, and then finds its own.
        assert pipeline.library.counts is acme.library.counts is beta.library.counts
        assert pipeline.library.counts.computed == computed + 3
        acme.close()
        assert beta.ask(QUESTION).mode == MODE, "the store is the first one's to close"
        assert {info.recipe.tenant for info in pipeline.store.ls()} == {tenant_tag("acme"), tenant_tag("beta")}
        pipeline.for_tenant(None).ask(QUESTION)
        pipeline.store.flush()
        assert "" in {info.recipe.tenant for info in pipeline.store.ls()}
        with pytest.raises(InputError, match="tenant 'a/b'"):
            pipeline.for_tenant("a/b")
    pipeline.close()
    with pytest.raises(StoreError):
        beta.store.ls()


def test_a_tenant_without_the_salt_makes_no_store(tmp_path, llama, monkeypatch):
    monkeypatch.delenv(SALT_VARIABLE)
    with pytest.raises(InputError, match="BLENDKV_TENANT_SALT is not set"):
        opened(tmp_path / "s", llama, "acme")
    assert not (tmp_path / "s").exists()


def test_no_more_is_computed_than_the_quota_takes(llama, tmp_path):
    """Else the first chunks would be evicted by the last ones, all of them just computed."""
    tag = tenant_tag("acme")
    chunks = [as_token_ids(range(start, start + 20)) for start in range(20, 100, 20)]
    size = llama.kv_bytes_per_token * 20
    quotas = Quotas({tag: 2 * size + size // 2 + 20_000})
    with KVStore.open(tmp_path / "s", memory_bytes=0, quotas=quotas) as store:
        library = llama.library(store, "bos", as_token_ids([]), None, tag)
        left_out = library.precompute(chunks, None)
        assert left_out >= 1
        assert [library.has(chunk) for chunk in chunks] == [True] * (4 - left_out) + [False] * left_out
        assert not store.stat().tiers[-1].evictions.get("quota", 0)
        assert llama.library(store, "bos", as_token_ids([])).precompute(chunks, None) == 0
