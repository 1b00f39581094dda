"""What cannot be served is refused in OpenAI's words, with the field and the way out."""

from __future__ import annotations

import pytest
from serving import chat, check_error
from tiny_hub import CONTEXT, TOPICS, open_pipeline

from blendkv.errors import EngineError, StoreError
from blendkv.serve.openai import _NEUTRAL

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2), ("logprobs", True), ("top_logprobs", 3), ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}), ("logit_bias", {"5": 1}), ("presence_penalty", 0.5),
        ("frequency_penalty", -1), ("functions", [{}]), ("reasoning_effort", "low"), ("audio", {"voice": "x"}),
        ("top_k", 4), ("kv_transfer_params", {"blendkv": {}}), ("cache_salt", "x"), ("n", "1"), ("n", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", ["tiny", "tiny/rag"])
async def test_fields_that_would_change_the_answer(connect, field, value, model):
    client = await connect()
    error = check_error(await client.post("/v1/chat/completions", json=chat(model, **{field: value})), 400, field)
    assert (error["param"], error["type"]) == (field, "invalid_request_error")
    assert error["code"] == "unsupported_parameter"


async def test_fields_that_ask_for_nothing(connect):
    client = await connect()
    nothing = {name: values[0] if values else None for name, values in _NEUTRAL.items()} | {"presence_penalty": 0.0}
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "seed": None, "stop": None}
    response = await client.post("/v1/chat/completions", json=chat("tiny", **nothing, **ignored))
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"), ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"), ({"stop": 5}, "stop"), ({"messages": []}, "messages"), ({"seed": 1.5}, "seed"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"), ({"model": 5}, "model"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"), ({"blendkv": 5}, "blendkv"),
        ({"blendkv": {"k": 0}}, "blendkv.k"), ({"blendkv": {"size": 1}}, "blendkv.size"),
        ({"blendkv": {"mode": "wild"}}, "blendkv.mode"), ({"blendkv": {"where": {"a": {"b": 1}}}}, None),
        ({"messages": [{"role": "user", "content": " "}]}, None), ({"stop": [""]}, None),
    ],
)  # fmt: skip
async def test_values_that_cannot_be_used(connect, fields, param):
    client = await connect()
    check_error(await client.post("/v1/chat/completions", json={**chat(), **fields}), 400, param=param)
    streamed = await client.post("/v1/chat/completions", json={**chat(), **fields, "stream": True})
    check_error(streamed, 400, param=param)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_object(connect, body):
    client = await connect()
    check_error(await client.post("/v1/chat/completions", content=body), 400, "JSON")


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [[1], [2]], [10**9], [-1], [1.5], 5, None])
async def test_prompts_that_cannot_be_completed(connect, prompt):
    client = await connect()
    check_error(await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt}), 400, "prompt")


async def test_a_collections_question_is_text(connect):
    client = await connect()
    check_error(await client.post("/v1/completions", json={"model": "tiny/rag", "prompt": [5, 6]}), 400, "token ids")


async def test_search_options_need_a_collection(connect):
    client = await connect()
    refused = await client.post("/v1/chat/completions", json=chat("tiny", blendkv={"k": 2, "mode": "full"}))
    check_error(refused, 400, "k, mode", "'default'", param="blendkv.collection")


async def test_unknown_models_and_routes(connect):
    client = await connect()
    for model in ("gpt", "tiny/", "tiny/rag/none", "tiny/ragged", "tinyrag"):
        check_error(await client.post("/v1/chat/completions", json=chat(model)), 404, repr(model), "tiny, tiny/rag")
    check_error(await client.get("/v1/nothing"), 404, "/v1/nothing")
    check_error(await client.get("/v1/chat/completions"), 405, "GET")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long_says_what_would_fit(connect, stream):
    client = await connect()
    field = {"collection": True, "k": 17}
    long = chat("tiny", " ".join(TOPICS.values()) * 4, blendkv=field, stream=stream)
    error = check_error(await client.post("/v1/chat/completions", json=long), 413, f"holds {CONTEXT}", param="messages")
    assert error["code"] == "context_length_exceeded"
    fitting = error["suggestion"]["blendkv"]["k"]
    assert 0 < fitting < 17
    long["blendkv"] = {"collection": True, "k": fitting}
    assert (await client.post("/v1/chat/completions", json=long)).status_code == 200
    long["blendkv"] = {"collection": True, "k": fitting + 1}
    assert (await client.post("/v1/chat/completions", json=long)).status_code == 413
    hopeless = chat(question="word " * CONTEXT, stream=stream)
    error = check_error(await client.post("/v1/chat/completions", json=hopeless), 413, "shorten")
    assert error["suggestion"] == {"messages": "shorten the conversation"}
    plain = chat("tiny", "word " * CONTEXT, stream=stream)
    check_error(await client.post("/v1/chat/completions", json=plain), 413, f"holds {CONTEXT}")


async def test_a_store_that_cannot_be_searched(connect, pipeline, monkeypatch):
    client = await connect()

    def broken(*arguments):
        raise StoreError("the disk is gone")

    monkeypatch.setattr(pipeline.retriever, "retrieve", broken)
    refused = await client.post("/v1/chat/completions", json=chat())
    error = check_error(refused, 503, "the disk is gone")
    assert error["code"] == "store_unavailable"
    assert refused.headers["retry-after"]
    assert (await client.post("/v1/chat/completions", json=chat("tiny"))).status_code == 200


async def test_an_engine_that_fails(connect, pipeline, monkeypatch):
    client = await connect()

    def broken(*arguments, **options):
        raise EngineError("its process is gone")

    monkeypatch.setattr(pipeline, "answer", broken)
    error = check_error(await client.post("/v1/chat/completions", json=chat()), 503, "its process is gone")
    assert error["code"] == "engine_failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_nobody_expected_tells_no_secrets(connect, pipeline, monkeypatch, stream, caplog):
    client = await connect()

    def broken(*arguments, **options):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(pipeline, "answer", broken)
    failed = await client.post("/v1/chat/completions", json=chat(stream=stream), headers={"X-Request-Id": "id-7"})
    error = check_error(failed, 500, "log")
    assert (error["type"], failed.headers["x-request-id"]) == ("server_error", "id-7")
    assert "secret" not in failed.text
    assert "secret detail" in caplog.text
    assert "id-7" in caplog.text


async def test_a_model_without_a_chat_template(connect, gpt2, tmp_path):
    with open_pipeline(tmp_path / "s", gpt2) as pipeline:
        client = await connect({"default": pipeline})
        check_error(await client.post("/v1/chat/completions", json=chat("tiny")), 400, "/v1/completions")
        done = await client.post("/v1/completions", json={"model": "tiny", "prompt": "A list is"})
        assert done.status_code == 200


async def test_a_model_that_cannot_be_blended_is_prefilled_and_said_so(connect, gpt2, tmp_path):
    from tiny_hub import write_corpus

    with open_pipeline(tmp_path / "s", gpt2) as pipeline:
        pipeline.ingest([write_corpus(tmp_path / "corpus", ["with"])], chunk_tokens=48)
        client = await connect({"default": pipeline})
        told = (await client.post("/v1/chat/completions", json=chat())).json()["blendkv"]
        assert (told["outcome"], told["mode"]) == ("fallback", "full")
        assert "use full prefill" in told["reason"]
        assert (await client.get("/health")).json()["blending"] == f"no: {told['reason']}"
        page = (await client.get("/metrics")).text
        assert 'blendkv_requests_total{outcome="fallback",reason="unsupported_model"} 1.0' in page
