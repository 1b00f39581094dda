"""Spans of a request: what they hang under, and what they tell; and nothing at all without OpenTelemetry."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import httpx
import pytest
from daemon_process import DaemonProcess
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from serving import chat
from tiny_hub import SYSTEM, BagEmbedder, open_pipeline, write_corpus

from blendkv.daemon.client import DaemonStore
from blendkv.observe import tracing
from blendkv.pipeline import RagPipeline
from blendkv.retrieval.collection import Collection
from blendkv.retrieval.retriever import HybridRetriever
from blendkv.serve.app import create_app
from blendkv.serve.backends import Backends
from blendkv.serve.settings import ServeSettings

PARTS = {"blendkv.lookup", "blendkv.load", "blendkv.blend", "blendkv.decode"}
TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch):
    """Records spans; the tracer is that of a provider of the test's own, because the global one can be set once."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


@pytest.fixture
def filled(llama, tmp_path):
    with open_pipeline(tmp_path / "s", llama) as pipeline:
        pipeline.ingest([write_corpus(tmp_path / "corpus", repeat=1)], chunk_tokens=48)
    return tmp_path / "s"


def by_name(exporter):
    found = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def serve(pipeline, *requests):
    """Answers of a server to requests (path, headers, body)."""

    async def all_of_them():
        transport = httpx.ASGITransport(create_app(Backends("tiny", "torch", {"default": pipeline}), ServeSettings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            return [await client.post(path, headers=headers, json=body) for path, headers, body in requests]

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_and_its_parts(spans, llama, filled, stream):
    body = chat(stream=stream, max_tokens=5, blendkv={"collection": True, "mode": "blend:strided@0.5"})
    headers = {"traceparent": f"00-{TRACE}-{ABOVE}-01", "x-request-id": "mine"}
    with open_pipeline(filled, llama) as pipeline:
        (response,) = serve(pipeline, ("/v1/chat/completions", headers, body))
    assert response.status_code == 200
    found = by_name(spans)
    assert set(found) == {"blendkv.request", *PARTS}
    (request,) = found["blendkv.request"]
    assert format(request.context.trace_id, "032x") == TRACE
    assert format(request.parent.span_id, "016x") == ABOVE
    assert request.kind is trace.SpanKind.SERVER
    told = dict(request.attributes)
    assert told["http.route"] == "/v1/chat/completions"
    assert told["http.response.status_code"] == 200
    assert told["blendkv.request_id"] == "mine"
    assert told["blendkv.outcome"] == "blended"
    assert told["blendkv.collection"] == "default"
    for name in PARTS:
        (part,) = found[name]
        assert part.parent.span_id == request.context.span_id, name
        assert request.start_time <= part.start_time <= part.end_time, name
    (lookup,), (load,), (blend,), (decode,) = (found[f"blendkv.{n}"] for n in ("lookup", "load", "blend", "decode"))
    assert lookup.attributes["blendkv.chunks"] == lookup.attributes["blendkv.hits"] == 3
    assert lookup.attributes["blendkv.missing"] == 0
    assert lookup.attributes["blendkv.tiers"] == load.attributes["blendkv.tiers"] == ("disk",)
    assert 0 < lookup.attributes["blendkv.tokens"] < blend.attributes["blendkv.tokens"]
    assert load.attributes["blendkv.bytes"] > 0
    assert load.attributes["blendkv.layers"] == len(llama.runner.layers)
    assert blend.attributes["blendkv.budget_asked"] == 0.5
    assert 0 < blend.attributes["blendkv.budget_spent"] <= 0.5
    assert told["blendkv.recomputed_tokens"] == blend.attributes["blendkv.recomputed_tokens"] > 0
    assert decode.attributes["blendkv.tokens"] == told["blendkv.generated_tokens"] == 5
    assert decode.attributes["blendkv.prompt_tokens"] == sum(
        told[f"blendkv.{kind}_tokens"] for kind in ("reused", "recomputed", "fresh")
    )


def test_missing_chunks_are_told(spans, llama, filled):
    with open_pipeline(filled, llama) as pipeline:
        for row in pipeline.store.ls():
            pipeline.store.remove(row.key)
        pipeline.ask("What does the nonlocal statement do?", mode="reuse")
    (lookup,), (compute,) = (by_name(spans)[f"blendkv.{name}"] for name in ("lookup", "compute"))
    assert lookup.attributes["blendkv.missing"] == compute.attributes["blendkv.chunks"] == 3
    assert lookup.attributes["blendkv.hits"] == 0
    assert lookup.attributes["blendkv.tiers"] == ()
    assert compute.attributes["blendkv.tokens"] == lookup.attributes["blendkv.tokens"]


def test_errors_and_probes(spans, llama, filled):
    async def probe(pipeline):
        transport = httpx.ASGITransport(create_app(Backends("tiny", "torch", {"default": pipeline}), ServeSettings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            return [(await client.get(path)).status_code for path in ("/health", "/metrics", "/v1/nothing")]

    with open_pipeline(filled, llama) as pipeline:
        assert asyncio.run(probe(pipeline)) == [200, 200, 404]
    (request,) = by_name(spans)["blendkv.request"]
    assert request.attributes["http.response.status_code"] == 404
    assert request.attributes["http.route"] == "other"
    assert request.parent is None


def test_calls_of_the_daemon(spans, llama, filled):
    collection, embedder = Collection(filled), BagEmbedder()
    with DaemonProcess(filled), DaemonStore(filled, 20.0) as store:
        pipeline = RagPipeline(
            llama, store, HybridRetriever(collection, embedder), system=SYSTEM, top_k=3, collection=collection,
            embedder=embedder,
        )  # fmt: skip
        with tracing.span("mine"):
            pipeline.ask("What does the nonlocal statement do?", mode="reuse")
        found = by_name(spans)
        (mine,), (lookup,) = found["blendkv.mine"], found["blendkv.lookup"]
        assert lookup.parent.span_id == mine.context.span_id
        (call,) = [span for span in found["blendkv.daemon"] if span.parent.span_id == lookup.context.span_id]
        # The system prefix is looked up with the chunks, in one message.
        assert dict(call.attributes) == {"blendkv.request": "Get", "blendkv.chunks": 4, "blendkv.lent": 4}
        spans.clear()
        store.get(store.ls()[0].key, [1])
        assert not spans.get_finished_spans(), "calls that belong to no request are not told one by one"
        collection.close()


def test_an_exception_is_told(spans):
    with pytest.raises(ValueError, match="why"), tracing.span("mine"):
        raise ValueError("why")
    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok
    assert span.events[0].attributes["exception.message"] == "why"


def test_without_opentelemetry_nothing_happens():
    code = """
import sys
sys.modules["opentelemetry"] = None
from blendkv.observe import tracing
with tracing.span("a", tokens=1) as told, tracing.detail("b") as more, tracing.request({}, "GET", "/", "1") as asked:
    told.set(x=1), more.set(x=1), asked.answered(500), tracing.current().set(x=1)
assert tracing.carried(max)(1, 2) == 2
assert tracing.trace is None
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
