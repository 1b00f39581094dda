"""What a session says of itself over HTTP reaches the policies of the stores."""

from __future__ import annotations

import base64

import pytest
from serving import chat, check_error
from tiny_hub import open_pipeline

from blendkv.market.context import current_use
from blendkv.serve.keys import Client
from blendkv.tenants import SALT_VARIABLE

pytestmark = pytest.mark.asyncio
HINT = "/v1/blendkv/hint"


@pytest.mark.parametrize(("policy", "listens"), [("market", True), ("lru", False)])
async def test_the_answer_says_whether_a_policy_listens(connect, tmp_path, llama, policy, listens):
    with open_pipeline(tmp_path / "s", llama, policy=policy) as pipeline:
        client = await connect({"default": pipeline})
        for body in ({"what": "tool_started", "ttl": 30}, {"what": "tool_finished"}, {"what": "session_ended"}):
            answered = await client.post(HINT, json={"session": "loop-1", **body})
            assert (answered.status_code, answered.json()) == (200, {"listening": listens})


async def test_every_store_is_told_and_one_that_listens_is_enough(connect, tmp_path, llama, monkeypatch):
    with (
        open_pipeline(tmp_path / "a", llama, policy="lru") as deaf,
        open_pipeline(tmp_path / "b", llama, policy="market") as one,
        open_pipeline(tmp_path / "c", llama, policy="market") as two,
    ):
        told = []
        for pipeline in (deaf, one, two):
            hear = pipeline.store.hint
            monkeypatch.setattr(pipeline.store, "hint", lambda *said, hear=hear: (told.append(said), hear(*said))[1])
        client = await connect({"a": deaf, "b": one, "c": two})
        answered = await client.post(HINT, json={"session": "s", "what": "tool_started", "ttl": 1.5})
        assert answered.json() == {"listening": True}
        assert told == [("s", "tool_started", 1.5)] * 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"session": "s"}, ("what",)),
        ({"session": "two words", "what": "session_ended"}, ("session is 'two words'", "1 to 64")),
        ({"session": "s", "what": "gone"}, ("what is 'gone'", "tool_started, tool_finished, session_ended")),
        ({"session": "s", "what": "tool_started"}, ("ttl is 0.0", "86400")),
        ({"session": "s", "what": "tool_started", "ttl": -1}, ("ttl is -1.0",)),
        ({"session": "s", "what": "tool_started", "ttl": "1"}, ("ttl",)),
        ({"session": "s", "what": "session_ended", "ttl": 1}, ("leave it out",)),
        ({"session": "s", "what": "session_ended", "who": "me"}, ("who",)),
        ([], ("an object is allowed",)),
    ],
)
async def test_a_wrong_hint_is_refused_in_one_line(connect, body, words):
    client = await connect()
    check_error(await client.post(HINT, json=body), 400, *words)


async def test_hints_are_behind_the_key_and_sessions_are_their_tenants(connect, pipeline, monkeypatch):
    monkeypatch.setenv(SALT_VARIABLE, base64.b64encode(bytes(range(32))).decode())
    told, seen = [], []
    hear, get = pipeline.store.hint, pipeline.store.get

    def look_up(key, token_ids):
        seen.append(current_use().session)
        return get(key, token_ids)

    monkeypatch.setattr(pipeline.store, "hint", lambda *said: (told.append(said[0]), hear(*said))[1])
    monkeypatch.setattr(pipeline.store, "get", look_up)
    client = await connect(clients={"a": Client("acme"), "b": Client("beta")})
    body = {"session": "same", "what": "session_ended"}
    check_error(await client.post(HINT, json=body), 401)
    asked = chat(blendkv={"collection": True, "session": "same", "mode": "blend:strided@0.3"})
    for key in ("a", "b"):
        headers = {"Authorization": f"Bearer {key}"}
        assert (await client.post(HINT, json=body, headers=headers)).status_code == 200
        answered = await client.post("/v1/chat/completions", json=asked, headers=headers)
        assert answered.status_code == 200, answered.text
        assert set(seen) == {told[-1]}
        seen.clear()
    assert len(set(told)) == 2
    assert "same" not in told
