"""Documents over HTTP: ingested, found, listed, deleted; and what cannot be ingested is said."""

from __future__ import annotations

import asyncio
import json

import pytest
from serving import QUESTION, chat, check_error
from tiny_hub import TOPICS, open_pipeline

from blendkv.retrieval.split import Splitter
from blendkv.types import Document

pytestmark = pytest.mark.asyncio
FACTS = {"cat": "The cat Mimi sleeps in the kitchen.", "dog": "The dog Rex sleeps in the garden, by the old tree."}


def documents(names=tuple(FACTS)) -> list[dict]:
    return [{"id": name, "text": FACTS[name], "metadata": {"kind": name}} for name in names]


@pytest.fixture
def empty(tmp_path, llama):
    with open_pipeline(tmp_path / "empty", llama) as opened:
        yield opened


async def test_ingest_then_query_then_delete(connect, empty):
    client = await connect({"default": empty})
    assert (await client.get("/v1/rag/documents")).json()["data"] == []
    report = (await client.post("/v1/rag/ingest", json={"documents": documents()})).json()
    assert report["documents"]["added"] == report["chunks"] == report["kv_computed"] == 2
    assert report["skipped"] == []

    query = {"question": "Where does the dog sleep?", "k": 1, "where": {"kind": "dog"}, "max_tokens": 4}
    answered = await client.post("/v1/rag/query", json=query)
    found = answered.json()
    (source,) = found["blendkv"]["sources"]
    assert (source["document"], source["text"].strip()) == ("posted.jsonl:dog", FACTS["dog"])
    assert source["metadata"]["kind"] == "dog"
    assert found["usage"]["completion_tokens"] <= 4
    assert found["answer"] == (await client.post("/v1/rag/query", json=query)).json()["answer"]
    assert answered.headers["x-blendkv-outcome"] == found["blendkv"]["outcome"] == "blended"

    listed = (await client.get("/v1/rag/documents", params={"collection": "default"})).json()["data"]
    assert [(d["id"], d["chunks"]) for d in listed] == [("posted.jsonl:cat", 1), ("posted.jsonl:dog", 1)]
    assert all(d["tokens"] > 0 for d in listed)
    before = len(empty.store.ls())
    gone = (await client.delete("/v1/rag/documents/posted.jsonl:dog")).json()
    assert gone == {"collection": "default", "id": "posted.jsonl:dog", "deleted": True, "chunk_kv_removed": 1}
    assert len(empty.store.ls()) == before - 1
    error = check_error(await client.delete("/v1/rag/documents/posted.jsonl:dog"), 404, "posted.jsonl:dog")
    assert error["code"] == "document_not_found"
    left = (await client.post("/v1/rag/query", json={**query, "where": None, "k": 5})).json()["blendkv"]["sources"]
    assert {s["document"] for s in left} == {"posted.jsonl:cat"}


async def test_a_document_sent_again_replaces_itself(connect, empty):
    client = await connect({"default": empty})
    await client.post("/v1/rag/ingest", json={"documents": documents()})
    changed = [{"id": "cat", "text": "The cat Mimi moved out."}]
    report = (await client.post("/v1/rag/ingest", json={"documents": changed})).json()
    assert report["documents"] == {"added": 0, "changed": 1, "unchanged": 0, "removed": 0, "new_chunks": 1}
    again = (await client.post("/v1/rag/ingest", json={"documents": changed})).json()
    assert again["documents"]["unchanged"] == 1


async def test_kv_that_another_document_shares_stays(connect, empty):
    client = await connect({"default": empty})
    twins = [{"id": name, "text": FACTS["cat"]} for name in ("a", "b")]
    await client.post("/v1/rag/ingest", json={"documents": twins})
    gone = [(await client.delete(f"/v1/rag/documents/posted.jsonl:{name}")).json() for name in ("a", "b")]
    assert [g["chunk_kv_removed"] for g in gone] == [0, 1]


async def test_ids_with_slashes_and_dots(connect, pipeline):
    client = await connect()
    ids = [d["id"] for d in (await client.get("/v1/rag/documents")).json()["data"]]
    assert sorted(ids) == sorted(f"corpus/{topic}.txt" for topic in TOPICS)
    assert (await client.delete("/v1/rag/documents/corpus/café.txt")).json()["deleted"]
    assert (await client.delete("/v1/rag/documents/corpus%2Fwith.txt")).json()["deleted"]
    assert pipeline.documents == len(TOPICS) - 2


async def test_chunks_left_for_their_first_use(connect, empty):
    client = await connect({"default": empty})
    body = {"documents": documents(), "precompute": "lazy"}
    report = (await client.post("/v1/rag/ingest", json=body)).json()
    assert (report["kv_computed"], report["kv_left_for_first_use"]) == (0, 2)
    told = (await client.post("/v1/rag/query", json={"question": QUESTION})).json()["blendkv"]
    assert told["outcome"] == "blended"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "documents"), ({"documents": []}, "documents"), ({"documents": [{"id": "a"}]}, "documents.0.text"),
        ({"documents": [{"id": "", "text": "x"}]}, "documents.0.id"), ({"documents": ["x"]}, "documents.0"),
        ({"documents": [{"id": "a", "text": "x", "more": 1}]}, "documents.0.more"),
        ({"documents": [{"id": "a", "text": "x"}], "precompute": "some"}, "precompute"),
        ({"documents": [{"id": "a", "text": "x"}], "sources": ["/etc"]}, "sources"),
    ],
)  # fmt: skip
async def test_what_cannot_be_ingested(connect, body, param):
    client = await connect()
    check_error(await client.post("/v1/rag/ingest", json=body), 400, param=param)


async def test_documents_that_cannot_be_read_are_skipped(connect, empty):
    client = await connect({"default": empty})
    mixed = [*documents(["cat"]), {"id": "blank", "text": " "}, {"id": "bad", "text": "\ud800"}]
    report = (await client.post("/v1/rag/ingest", content=json.dumps({"documents": mixed}))).json()
    assert report["documents"]["added"] == 1
    assert len(report["skipped"]) == 2
    assert report["skipped"][0].startswith("posted.jsonl, row 2: ")
    assert "/tmp" not in str(report)


async def test_a_collection_that_is_not_there(connect):
    client = await connect()
    for response in (
        await client.post("/v1/rag/ingest", json={"documents": documents(), "collection": "x"}),
        await client.post("/v1/rag/query", json={"question": "x", "collection": "x"}),
        await client.get("/v1/rag/documents", params={"collection": "x"}),
        await client.delete("/v1/rag/documents/a", params={"collection": "x"}),
    ):
        check_error(response, 404, "'x'", "default")


async def test_a_query_is_not_streamed_and_not_empty(connect):
    client = await connect()
    check_error(await client.post("/v1/rag/query", json={"question": "x", "stream": True}), 400, "stream")
    check_error(await client.post("/v1/rag/query", json={"question": " "}), 400, "empty")
    check_error(await client.post("/v1/rag/query", json={"question": "x", "mode": "fast"}), 400, param="mode")


async def test_what_another_process_ingests_is_found(connect, empty, llama, tmp_path):
    """Here by another pipeline over the same folder."""
    client = await connect({"default": empty})
    assert (await client.post("/v1/rag/query", json={"question": "cat"})).json()["blendkv"]["sources"] == []
    (tmp_path / "cat.txt").write_text(FACTS["cat"])
    with open_pipeline(empty.collection.path, llama) as other:
        other.ingest([tmp_path / "cat.txt"])
    told = (await client.post("/v1/rag/query", json={"question": "cat"})).json()["blendkv"]
    assert [s["document"] for s in told["sources"]] == ["cat.txt"]
    assert told["outcome"] == "blended"


async def test_ingests_take_turns_and_questions_go_on(connect, empty):
    client = await connect({"default": empty})
    await client.post("/v1/rag/ingest", json={"documents": [{"id": "hen", "text": "The hen lays eggs."}]})
    parts = [{"documents": documents([name])} for name in FACTS]
    done = await asyncio.gather(
        *(client.post("/v1/rag/ingest", json=part) for part in parts), client.post("/v1/chat/completions", json=chat())
    )
    assert [response.status_code for response in done] == [200, 200, 200]
    assert empty.documents == 3


async def test_a_question_in_the_middle_of_a_first_ingest(connect, empty):
    """Chunks are there, embeddings are not: come again. A wrong filter stays the caller's to mend."""
    client = await connect({"default": empty})
    splitter = Splitter(empty.engine.tokenizer, 48)
    empty.collection.sync([Document("a", FACTS["cat"])], splitter)
    refused = await client.post("/v1/chat/completions", json=chat())
    assert check_error(refused, 503, "come again")["code"] == "not_ready"
    empty.collection.embed_missing(empty.embedder)
    assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200


async def test_an_ingest_gives_way_when_the_server_ends(connect, empty):
    client = await connect({"default": empty})
    connect.app.state.service.stopping.set()
    stopped = await client.post("/v1/rag/ingest", json={"documents": documents()})
    error = check_error(stopped, 500, "shuts down", "send the rest again")
    assert error["type"] == "server_error"
