"""The figures of /metrics add up with the requests that were made."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from daemon_process import DaemonProcess, eventually
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from serving import chat
from tiny_hub import SYSTEM, BagEmbedder, open_pipeline
from verdicts import put_verdict

from blendkv.daemon.client import DaemonStore
from blendkv.observe.metrics import STAGES, Metrics
from blendkv.observe.reuse import Reasons, Reuse
from blendkv.pipeline import RagPipeline
from blendkv.retrieval.collection import Collection
from blendkv.retrieval.retriever import HybridRetriever

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


async def figures(client) -> dict[tuple[str, ...], float]:
    """Every sample, by name and label values in order of their names."""
    response = await client.get("/metrics", headers=OPENMETRICS)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    found = {}
    for family in read_openmetrics(response.text):
        assert family.documentation
        assert not family.unit or family.name.endswith(f"_{family.unit}")
        for sample in family.samples:
            found[(sample.name, *(v for _, v in sorted(sample.labels.items())))] = sample.value
    plain = await client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    assert {f.name for f in read_text(plain.text)} >= {
        "blendkv_requests",
        "blendkv_ttft_seconds",
        "blendkv_store_bytes",
    }
    return found


@pytest.mark.asyncio
async def test_they_add_up(connect, pipeline):
    client = await connect()
    asked = [
        chat(), chat(stream=True), chat("tiny"), chat("tiny", blendkv={"collection": True, "mode": "full"}), chat(),
        chat("tiny", blendkv={"collection": True, "mode": "blend:strided@0.5"}), chat(question=" "), chat("none"),
        chat("tiny", blendkv={"collection": True, "where": {"title": "nothing has it"}}),
    ]  # fmt: skip
    made = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in asked))
    bodies = [response.json() for response in made if response.status_code == 200 and response.text[0] == "{"]
    assert Counter(response.status_code for response in made) == {200: 7, 400: 1, 404: 1}
    found = await figures(client)
    outcomes = {key[1]: value for key, value in found.items() if key[0] == "blendkv_requests_total"}
    assert outcomes == {"blended": 4, "prefix": 1, "full": 1, "plain": 1, "error": 1, "cancelled": 0}
    statuses = {key[1:]: value for key, value in found.items() if key[0] == "blendkv_http_requests_total"}
    route = "/v1/chat/completions"
    assert {status: statuses[(route, status)] for status in ("200", "400", "404")} == {"200": 7, "400": 1, "404": 1}
    # The streamed request is the same as the first one.
    bodies.append(bodies[0])
    tokens = {kind: found[("blendkv_tokens_total", kind)] for kind in ("reused", "recomputed", "fresh", "generated")}
    usage = [body["usage"] for body in bodies]
    assert tokens["generated"] == sum(u["completion_tokens"] for u in usage)
    assert tokens["reused"] == sum(u["prompt_tokens_details"]["cached_tokens"] for u in usage)
    assert tokens["reused"] + tokens["recomputed"] + tokens["fresh"] == sum(u["prompt_tokens"] for u in usage)
    spent = [b["blendkv"]["budget_spent"] for b in bodies if b.get("blendkv", {}).get("budget_spent") is not None]
    assert found[("blendkv_budget_spent_ratio_count",)] == len(spent) == 5
    assert found[("blendkv_budget_spent_ratio_sum",)] == pytest.approx(sum(spent))
    for outcome, count in outcomes.items():
        assert found.get(("blendkv_ttft_seconds_count", outcome), 0) == (0 if outcome == "error" else count)
    assert {key[1] for key in found if key[0] == "blendkv_stage_seconds_total"} == set(STAGES)
    assert found[("blendkv_stage_seconds_total", "recompute")] > 0
    assert found[("blendkv_requests_running",)] == 0


@pytest.mark.asyncio
async def test_stores_and_libraries(connect, pipeline):
    client = await connect()
    await client.post("/v1/chat/completions", json=chat())
    found, stat = await figures(client), pipeline.store.stat()
    for tier in stat.tiers:
        assert found[("blendkv_store_bytes", "default", tier.name)] == tier.bytes > 0
        assert found[("blendkv_store_chunks", "default", tier.name)] == tier.chunks > 0
    assert found[("blendkv_store_limit_bytes", "default", "memory")] == 1 << 30
    assert ("blendkv_store_limit_bytes", "default", "disk") not in found
    assert found[("blendkv_store_lookups_total", "hit", "default", "disk")] > 0
    counts = pipeline.library.counts
    assert found[("blendkv_library_chunks_total", "hits", "default")] == counts.hits > 0
    assert found[("blendkv_library_chunks_total", "computed", "default")] == counts.computed == 0
    assert found[("blendkv_documents", "default")] == pipeline.documents > 0
    (key, *_) = [row.key for row in pipeline.store.ls()]
    pipeline.store.discard(key, "checksum: a test")
    pipeline.store.discard(next(row.key for row in pipeline.store.ls()), "something new: a test")
    pipeline.fallbacks["damaged chunk recomputed"] = 3
    found = await figures(client)
    assert found[("blendkv_store_discarded_total", "checksum", "default")] == 1
    assert found[("blendkv_store_discarded_total", "other", "default")] == 1
    assert found[("blendkv_incidents_total", "damaged_chunk_recomputed", "default")] == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("passed", [None, (), ("blend:strided@0.5",)], ids=["not_measured", "failed", "passed"])
async def test_the_gate(connect, store, llama, passed, request):
    """Its verdict on both pages; after one that failed, every blend is a fallback with the reason ``gate``."""
    if passed is not None:
        put_verdict(store, llama.fingerprint, *passed)
    state = request.node.callspec.id
    with open_pipeline(store, llama) as pipeline:
        client = await connect({"default": pipeline})
        body = (await client.post("/v1/chat/completions", json=chat())).json()["blendkv"]
        found = await figures(client)
        health = (await client.get("/health")).json()
    shown = {key[2]: value for key, value in found.items() if key[0] == "blendkv_gate"}
    assert shown == {name: float(name == state) for name in ("passed", "failed", "not_measured")}
    mode = "blend:strided@0.5" if passed else "blend:head_query@0.05"
    assert health["gate"] == {"default": {"verdict": state, "required": False, "mode": mode}}
    why = "the quality gate did not pass this model: KL 0.9, allowed 0.05"
    assert health["blending"] == (f"no: {why}" if state == "failed" else "yes")
    assert found.get(("blendkv_requests_total", "fallback", "gate")) == (1 if state == "failed" else None)
    assert found.get(("blendkv_incidents_total", "gate", "default")) == (1 if state == "failed" else None)
    assert (body["outcome"], body["reason"]) == (("fallback", why) if state == "failed" else ("blended", None))
    assert body["mode"] == ("full" if state == "failed" else mode)


@pytest.mark.asyncio
async def test_a_required_gate_refuses_a_request(connect, store, llama):
    put_verdict(store, llama.fingerprint, "blend:strided@0.5")
    with open_pipeline(store, llama, require_gate=True) as pipeline:
        client = await connect({"default": pipeline})
        asked = [chat(), chat("tiny", blendkv={"collection": True, "mode": "reuse"}),
                 chat("tiny", blendkv={"collection": True, "mode": "full"})]  # fmt: skip
        made = [await client.post("/v1/chat/completions", json=body) for body in asked]
    assert [response.status_code for response in made] == [200, 400, 200]
    assert "did not pass reuse; it passed blend:strided@0.5" in made[1].json()["error"]["message"]


@pytest.mark.asyncio
async def test_a_store_that_cannot_tell_is_left_out(connect, pipeline):
    client = await connect()
    pipeline.close()
    found = await figures(client)
    assert not [key for key in found if key[0] == "blendkv_store_bytes"]
    assert ("blendkv_requests_total", "blended", "") in found


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_prefill_saved_is_what_a_full_prefill_of_those_tokens_takes():
    metrics = Metrics(dict)
    times = {"prepare": 0.25, "score": 0.25, "ttft": 1.0, "total": 3.0}
    blended = Reuse("blended", "blend:head_query@0.05", None, 900, 40, 60, 0.05, 0.04)
    metrics.answered(blended, times, 0.0, 5)
    assert value(metrics, "blendkv_prefill_saved_seconds") == 0, "nothing is known of this machine yet"
    metrics.prefilled(500, 1.0)
    metrics.answered(blended, times, 0.5, 5)
    assert value(metrics, "blendkv_prefill_avoided_seconds_total") == pytest.approx(1000 * 1.0 / 500)
    assert value(metrics, "blendkv_prefill_spent_seconds_total") == pytest.approx(0.5)
    assert value(metrics, "blendkv_prefill_saved_seconds") == pytest.approx(1.5)
    assert value(metrics, "blendkv_stage_seconds_total", stage="decode") == 4.0
    assert value(metrics, "blendkv_stage_seconds_total", stage="queue") == 0.5
    assert value(metrics, "blendkv_ttft_seconds_sum", outcome="blended") == 2.5
    # A full prefill teaches its rate; a short one says little about it.
    metrics.answered(Reuse("plain", "full", fresh=10), {"question": 9.0, "ttft": 9.0, "total": 9.0}, 0.0, 1)
    metrics.answered(Reuse("full", "full", fresh=1000), {"question": 4.0, "ttft": 4.0, "total": 4.0}, 0.0, 1)
    metrics.answered(blended, times, 0.0, 5)
    rate = 0.002 + 0.2 * (0.004 - 0.002)
    assert value(metrics, "blendkv_prefill_avoided_seconds_total") == pytest.approx(2.0 + 1000 * rate)


@given(st.lists(st.text(max_size=60), max_size=200))
def test_reasons_are_few_whatever_comes(texts):
    reasons = Reasons()
    labels = {reasons.label(text) for text in texts}
    assert len(labels) <= 35
    assert reasons.label(None) == ""
    assert all(label and label == label.lower() for label in labels)
    assert [reasons.label(text) for text in texts[:1]] == [reasons.label(text) for text in texts[:1]]


def test_reasons_that_are_known():
    reasons = Reasons()
    assert reasons.label("store missing") == "store_missing"
    assert reasons.label("chunk KVs are damaged again and again while they are read: check it") == "damaged_chunk"
    assert reasons.label("x is an encoder-decoder; only decoder-only models are blended: use full prefill") == (
        "unsupported_model"
    )
    assert reasons.label("A sentence nobody knows: it goes on, and on, and on.") == "other"


@pytest.mark.asyncio
async def test_a_store_in_a_daemon(connect, store, llama):
    """What the daemon says, and how the server stands to it; while it is gone, the page stays."""
    collection, embedder = Collection(store), BagEmbedder()
    with DaemonProcess(store) as daemon, DaemonStore(store, 20.0) as kept:
        pipeline = RagPipeline(
            llama, kept, HybridRetriever(collection, embedder), system=SYSTEM, top_k=3, collection=collection,
            embedder=embedder,
        )  # fmt: skip
        client = await connect({"default": pipeline})
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
        found = await figures(client)
        assert found[("blendkv_daemon_up", "default")] == 1
        assert found[("blendkv_store_lookups_total", "hit", "default", "disk")] > 0
        chunks = found[("blendkv_store_chunks", "default", "disk")]
        assert not [key for key in found if key[0].startswith("blendkv_store_codec")], "the daemon tells of those"
        daemon.kill()
        answer = (await client.post("/v1/chat/completions", json=chat())).json()
        assert answer["blendkv"]["outcome"] in ("blended", "fallback")
        found = await figures(client)
        assert found[("blendkv_daemon_up", "default")] == 0
        missed = found[("blendkv_daemon_missed_calls_total", "default")]
        assert missed > 0
        assert found[("blendkv_store_chunks", "default", "disk")] == chunks, "the last that was heard"
        assert (await figures(client))[("blendkv_daemon_missed_calls_total", "default")] == missed
        with DaemonProcess(store):
            eventually(lambda: kept.up)
            found = await figures(client)
            assert found[("blendkv_daemon_up", "default")] == found[("blendkv_daemon_reconnects_total", "default")] == 1
        collection.close()


@pytest.mark.asyncio
async def test_codecs_of_a_store_in_this_process(connect, pipeline):
    found, stat = await figures(await connect()), pipeline.store.stat()
    assert found[("blendkv_store_codec_chunks", "raw", "default")] == stat.tiers[1].chunks
    assert found[("blendkv_store_codec_file_bytes", "raw", "default")] == stat.tiers[1].bytes
    assert not [key for key in found if key[0].startswith("blendkv_daemon")]
