"""Chats and completions over HTTP give what the pipeline gives, and say how."""

from __future__ import annotations

import json
import random

import pytest
from serving import QUESTION, chat, check_error
from tiny import seed_of_run
from tiny_hub import SYSTEM, TOPICS

from blendkv.blend import parse_mode
from blendkv.engines.base import GenerationOptions
from blendkv.prompt import Turn
from blendkv.types import Prompt, Segment, as_token_ids

pytestmark = pytest.mark.asyncio
SHORT = GenerationOptions(max_new_tokens=6)


def events(text: str) -> list[dict]:
    """The events of a stream, the end mark left out."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_models(connect):
    client = await connect()
    listed = (await client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["tiny", "tiny/rag"]
    assert (await client.get("/v1/models/tiny/rag")).json()["id"] == "tiny/rag"
    check_error(await client.get("/v1/models/other"), 404, "other", "tiny/rag", param="model")


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "tiny/rag"}, {"model": "tiny+rag"}, {"model": "tiny", "blendkv": {"collection": True}},
        {"model": "tiny", "blendkv": {"collection": "default"}},
    ],
)  # fmt: skip
async def test_every_way_to_name_the_collection(connect, pipeline, fields):
    client = await connect()
    expected = pipeline.ask(QUESTION, options=SHORT)
    response = await client.post("/v1/chat/completions", json=chat(**fields))
    body = response.json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert body["model"] == fields["model"]
    assert body["choices"][0]["finish_reason"] == expected.finish_reason
    report, told = expected.blend_report, body["blendkv"]
    assert told["outcome"] == "blended"
    assert [s["id"] for s in told["sources"]] == [s.chunk.id for s in expected.sources]
    assert told["budget_spent"] == report.budget_spent
    tokens = told["tokens"]
    assert tokens["recomputed"] == report.recomputed_tokens
    assert tokens["fresh"] == report.fresh_tokens
    assert sum(tokens.values()) == body["usage"]["prompt_tokens"] == expected.prompt_tokens
    assert body["usage"]["completion_tokens"] == expected.completion_tokens
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens["reused"]
    headers = response.headers
    assert headers["x-blendkv-outcome"] == "blended"
    assert headers["x-blendkv-mode"] == told["mode"] == "blend:head_query@0.05"
    assert int(headers["x-blendkv-tokens-reused"]) == tokens["reused"]
    assert float(headers["x-blendkv-budget-spent"]) == pytest.approx(told["budget_spent"], abs=1e-6)
    assert int(headers["x-blendkv-sources"]) == len(expected.sources)


async def test_mode_k_and_filter_of_a_request(connect):
    client = await connect()
    field = {"collection": True, "mode": "full", "k": 2, "where": {"title": "lambda"}}
    told = (await client.post("/v1/chat/completions", json=chat("tiny", blendkv=field))).json()["blendkv"]
    assert told["mode"] == told["outcome"] == "full"
    assert {s["document"] for s in told["sources"]} == {"corpus/lambda.txt"}
    assert len(told["sources"]) == 2
    assert told["budget_spent"] is None
    assert told["tokens"]["reused"] == 0


@pytest.mark.parametrize("route", ["chat", "completion"])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("model", ["tiny", "tiny/rag"])
async def test_a_stream_says_what_the_whole_says(connect, route, counted, model):
    client = await connect()
    path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
    body = chat(model) if route == "chat" else {"model": model, "prompt": QUESTION}
    whole = (await client.post(path, json=body)).json()
    options = {"stream_options": {"include_usage": True}} if counted else {}
    response = await client.post(path, json={**body, "stream": True, **options})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    counts = found.pop() if counted else None
    assert len({event["id"] for event in found}) == 1
    *pieces, last = found
    choices = [event["choices"][0] for event in found]
    if route == "chat":
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["choices"][0]["message"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * len(pieces)
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert ("blendkv" in last) == (model == "tiny/rag") == ("x-blendkv-collection" in response.headers)
    if counts is not None:
        assert counts["choices"] == []
        assert counts["usage"] == whole["usage"]
        assert all(event["usage"] is None for event in found)


async def test_a_plain_chat_is_the_models_own_template(connect, pipeline):
    client = await connect()
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    ]  # fmt: skip
    turns = [*messages[:3], {"role": "user", "content": "Why?"}]
    ids = pipeline.engine.tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    prompt = Prompt((Segment("query", as_token_ids(ids)),))
    expected = pipeline.answer(prompt, parse_mode("full"), (), SHORT).answer
    response = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
    body = response.json()
    assert body["choices"][0]["message"]["content"] == expected.text
    assert body["usage"]["prompt_tokens"] == len(ids)
    assert "blendkv" not in body
    told = {name for name in response.headers if name.startswith("x-blendkv")}
    assert told == {"x-blendkv-workload", "x-blendkv-queued-seconds"}


async def test_a_conversation_keeps_its_turns_behind_the_passages(connect, pipeline):
    client = await connect()
    earlier = [Turn("user", "What is a lambda?"), Turn("assistant", "A function.")]
    found = pipeline.retriever.retrieve("And its body?", 3)
    chunks = [s.chunk.token_ids for s in found]
    prompt = pipeline.prompts.conversation(chunks, earlier, "And its body?", "Speak plainly.")
    expected = pipeline.answer(prompt, pipeline.mode, found, SHORT).answer
    messages = [
        {"role": "system", "content": "Speak plainly."}, {"role": "user", "content": earlier[0].text},
        {"role": "assistant", "content": earlier[1].text}, {"role": "user", "content": "And its body?"},
    ]  # fmt: skip
    body = (await client.post("/v1/chat/completions", json={"model": "tiny/rag", "messages": messages})).json()
    assert body["choices"][0]["message"]["content"] == expected.text
    assert body["usage"]["prompt_tokens"] == len(prompt)
    assert body["blendkv"]["outcome"] == "blended"
    # The store's own system message is no other one: the prompt is a first turn's.
    own = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    same = (await client.post("/v1/chat/completions", json={"model": "tiny/rag", "messages": own})).json()
    alone = (await client.post("/v1/chat/completions", json=chat())).json()
    assert same["usage"] == alone["usage"]


async def test_completions_of_text_and_of_token_ids(connect, pipeline):
    client = await connect()
    ids = pipeline.engine.tokenizer(TOPICS["with"])["input_ids"]
    answers = [
        (await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt})).json()
        for prompt in (TOPICS["with"], [TOPICS["with"]], ids, [ids])
    ]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert {answer["usage"]["prompt_tokens"] for answer in answers} == {len(ids)}
    answered = (await client.post("/v1/completions", json={"model": "tiny/rag", "prompt": QUESTION})).json()
    assert answered["choices"][0]["text"] == pipeline.ask(QUESTION, options=SHORT).text


async def test_sampling_options_reach_the_engine(connect):
    client = await connect()
    seed = random.Random(seed_of_run()).randrange(1 << 30)
    print(f"seed {seed}")
    ask = chat("tiny", temperature=1.5, top_p=0.9, seed=seed, max_completion_tokens=20)
    texts = [(await client.post("/v1/chat/completions", json=ask)).json() for _ in range(2)]
    first, second = (t["choices"][0]["message"]["content"] for t in texts)
    greedy = (await client.post("/v1/chat/completions", json=chat("tiny", max_tokens=20))).json()
    assert first == second != greedy["choices"][0]["message"]["content"]
    whole = greedy["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 :][:3]
    cut = (await client.post("/v1/chat/completions", json=chat("tiny", max_tokens=20, stop=stop))).json()
    assert cut["choices"][0]["message"]["content"] == whole[: whole.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"


async def test_several_stores(connect, pipeline, tmp_path, llama):
    from tiny_hub import open_pipeline, write_corpus

    with open_pipeline(tmp_path / "second", llama) as second:
        second.ingest([write_corpus(tmp_path / "one", ["with"])], chunk_tokens=48)
        client = await connect({"first": pipeline, "second": second})
        names = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        assert names == ["tiny", "tiny/rag", "tiny/rag/first", "tiny/rag/second"]

        async def documents(model: str, **fields: object) -> set[str]:
            body = (await client.post("/v1/chat/completions", json=chat(model, **fields))).json()
            return {s["document"] for s in body["blendkv"]["sources"]}

        assert await documents("tiny/rag/second") == {"one/with.txt"}
        assert await documents("tiny/rag", blendkv={"collection": "second"}) == {"one/with.txt"}
        assert "one/with.txt" not in await documents("tiny+rag/first") | await documents("tiny/rag")
        refused = await client.post("/v1/chat/completions", json=chat("tiny", blendkv={"collection": "third"}))
        check_error(refused, 404, "third", "first, second", param="blendkv.collection")
