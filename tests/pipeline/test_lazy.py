"""Chunk KVs at first use: all that there is room for, and then what is worth more than what would leave."""

from __future__ import annotations

import pytest
from tiny_hub import open_pipeline, write_corpus

from blendkv.engines.base import GenerationOptions

SHORT = GenerationOptions(max_new_tokens=4)
LOOP = {"workload": "agent", "session": "loop"}


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


def lazily(folder, engine, corpus, **options):
    pipeline = open_pipeline(folder, engine, top_k=2, **options)
    assert pipeline.ingest([corpus], precompute="lazy", chunk_tokens=48).kv_computed == 0
    return pipeline


def keys(pipeline):
    pipeline.store.flush()
    return {row.key for row in pipeline.store.ls()}


def test_with_room_all_that_is_used_is_stored(tmp_path, llama, corpus):
    with lazily(tmp_path / "store", llama, corpus) as pipeline:
        for workload in ("single", "agent"):
            answer = pipeline.ask("What is a decorator?", options=SHORT, workload=workload)
        used = {pipeline.library.key(source.chunk.token_ids) for source in answer.sources}
        assert used <= keys(pipeline)
        counts = pipeline.library.counts
        assert counts.computed == counts.hits == len(used)
        assert counts.not_worth_storing == 0


def test_a_full_store_keeps_what_is_dearer(tmp_path, llama, corpus):
    with lazily(tmp_path / "roomy", llama, corpus) as roomy:
        roomy.ask("What is a decorator?", options=SHORT, **LOOP)
        loop = keys(roomy)
        size = roomy.store.stat().tiers[-1].bytes
        answers = [roomy.ask(question, options=SHORT).text for question in ("What is a lock?", "What is a socket?")]
    with lazily(tmp_path / "store", llama, corpus, disk=size + 64) as pipeline:
        pipeline.ask("What is a decorator?", options=SHORT, **LOOP)
        assert keys(pipeline) == loop
        found = [
            pipeline.ask(question, options=SHORT, workload="single", session=f"shot-{number}").text
            for number, question in enumerate(("What is a lock?", "What is a socket?"))
        ]
        assert found == answers  # with the KV that was computed for them alone
        assert keys(pipeline) == loop
        counts = pipeline.library.counts
        assert counts.not_worth_storing == counts.computed - (len(loop) - 1) > 0  # the system prefix is no chunk
        assert pipeline.store.stat().tiers[-1].refused == {"price": counts.not_worth_storing}
        before = counts.not_worth_storing
        pipeline.ask("What is a lock?", options=SHORT, **LOOP)  # now somebody is to come back for them
        assert counts.not_worth_storing == before
        assert not keys(pipeline) <= loop
