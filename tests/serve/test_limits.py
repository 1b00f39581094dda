"""Key, limits, time-outs, queue, clients that leave, draining: on a scripted engine, nothing depends on speed."""

from __future__ import annotations

import asyncio
import json

import pytest
from serving import chat, check_error, until

pytestmark = pytest.mark.asyncio
PATH = "/v1/chat/completions"


async def test_the_key(connect, script):
    client = await connect(api_key="sesame")
    script.allow(100)
    for word in (None, "Bearer sesam", "Bearer", "Basic sesame", "sesame"):
        headers = {} if word is None else {"Authorization": word}
        refused = await client.post(PATH, json=chat(), headers=headers)
        error = check_error(refused, 401, "Authorization: Bearer KEY")
        assert (error["code"], refused.headers["www-authenticate"]) == ("invalid_api_key", "Bearer")
        check_error(await client.get("/v1/nothing", headers=headers), 401)
    for path in ("/health", "/metrics"):
        assert (await client.get(path)).status_code == 200
    allowed = await client.post(PATH, json=chat(), headers={"Authorization": "Bearer sesame"})
    assert allowed.status_code == 200
    assert len(script.generations) == 1


async def test_the_size_of_a_body(connect, script):
    client = await connect(max_body_bytes=1000)
    check_error(await client.post(PATH, json=chat(question="x" * 1000)), 413, "1000 bytes")

    async def unannounced():
        for _ in range(5):
            yield b"x" * 300

    check_error(await client.post(PATH, content=unannounced()), 413, "1000 bytes")
    script.allow(3)
    assert (await client.post(PATH, json=chat())).status_code == 200


async def test_too_many_at_once(connect, script):
    client = await connect(max_requests=2)
    waiting = [asyncio.create_task(client.post(PATH, json=chat())) for _ in range(2)]
    await until(lambda: script.generations and connect.app.state.admission.running == 2)
    refused = await client.post(PATH, json=chat())
    assert check_error(refused, 429, "come again")["code"] == "too_many_requests"
    assert refused.headers["retry-after"] == "1"
    assert (await client.get("/health")).json()["running"] == 2
    script.allow(6)
    assert [(await task).status_code for task in waiting] == [200, 200]
    script.allow(3)
    assert (await client.post(PATH, json=chat())).status_code == 200


async def test_one_at_a_time_in_the_order_they_came(connect, script):
    client = await connect()
    waiting = []
    for number in range(4):
        waiting.append(asyncio.create_task(client.post(PATH, json=chat())))
        await until(lambda wanted=number + 1: connect.app.state.admission.running == wanted)
    await until(lambda: script.generations)
    assert len(script.generations) == 1, "the others wait for their turn"
    for number in range(4):
        script.allow(3)
        assert (await waiting[number]).status_code == 200
    body = waiting[3].result().json()
    assert body["choices"][0]["message"]["content"] == "0 1 2 "
    assert body["blendkv"]["seconds"]["queue"] > 0


async def test_the_event_loop_is_never_blocked(connect, script):
    client = await connect()
    running = asyncio.create_task(client.post(PATH, json=chat()))
    await until(lambda: script.generations)
    assert (await client.get("/health")).json()["status"] == "ready"
    assert not running.done()
    script.allow(3)
    assert (await running).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long(connect, script, stream):
    client = await connect(request_timeout=0.3)
    error = check_error(await client.post(PATH, json=chat(stream=stream)), 504, "0.3 seconds")
    assert (error["type"], error["code"]) == ("timeout_error", "timeout")
    await until(lambda: script.generations and script.generations[0].cancelled.is_set())
    queued = [asyncio.create_task(client.post(PATH, json=chat(stream=stream))) for _ in range(2)]
    for task in queued:
        check_error(await task, 504)
    script.allow(3)
    async with asyncio.timeout(20):  # the turn has been given back
        while (await client.post(PATH, json=chat())).status_code != 200:
            pass


async def test_a_stream_that_takes_too_long_ends_with_an_error(connect, script):
    client = await connect(request_timeout=3.0)
    script.allow(1)
    response = await client.post(PATH, json=chat(stream=True))
    assert response.status_code == 200
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
    assert pieces[-1]["choices"][0]["delta"]["content"] == "0 "
    assert last["error"]["code"] == "timeout"
    await until(lambda: script.generations[0].cancelled.is_set())


async def test_a_stream_that_breaks_ends_with_an_error(connect, script):
    client = await connect()
    script.fails_at = 2
    script.allow(3)
    response = await client.post(PATH, json=chat(stream=True))
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
    assert len(pieces) == 3
    assert last["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert 'blendkv_requests_total{outcome="error",reason=""} 1.0' in (await client.get("/metrics")).text


class Client:
    """A client that can leave, spoken to in ASGI."""

    def __init__(self, body: dict) -> None:
        self.left = asyncio.Event()
        self.sent: list[dict] = []
        self._body: bytes | None = json.dumps(body).encode()

    async def receive(self) -> dict:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        self.sent.append(message)

    def ask(self, app) -> asyncio.Task:
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": PATH, "raw_path": PATH.encode(), "query_string": b"", "root_path": "", "scheme": "http",
            "headers": [(b"host", b"test")], "client": ("test", 1), "server": ("test", 80),
        }  # fmt: skip
        return asyncio.create_task(app(scope, self.receive, self.send))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pieces", [0, 1])
async def test_a_client_that_leaves_stops_the_engine(connect, script, stream, pieces):
    client = await connect()
    leaving = Client(chat(stream=stream))
    task = leaving.ask(connect.app)
    script.allow(pieces)
    await until(lambda: script.generations and len(script.generations[0].tokens) == pieces)
    if stream and pieces:
        await until(lambda: len(leaving.sent) > 1)
    leaving.left.set()
    await asyncio.wait_for(task, 20)
    await until(lambda: script.generations[0].cancelled.is_set())
    assert not any(b"[DONE]" in message.get("body", b"") for message in leaving.sent)
    script.allow(3)
    assert (await client.post(PATH, json=chat())).status_code == 200, "the turn has been given back"
    page = (await client.get("/metrics")).text
    assert 'blendkv_requests_total{outcome="cancelled",reason=""} 1.0' in page
    assert "blendkv_requests_running 0.0" in page


async def test_a_client_that_leaves_the_queue_never_starts(connect, script):
    client = await connect()
    first = asyncio.create_task(client.post(PATH, json=chat()))
    await until(lambda: script.generations)
    leaving = Client(chat())
    task = leaving.ask(connect.app)
    await until(lambda: connect.app.state.admission.running == 2)
    leaving.left.set()
    await asyncio.wait_for(task, 20)
    script.allow(3)
    assert (await first).status_code == 200
    assert len(script.generations) == 1


async def test_draining(connect, script):
    client = await connect()
    running = asyncio.create_task(client.post(PATH, json=chat()))
    await until(lambda: script.generations)
    admission = connect.app.state.admission
    admission.draining = True
    refused = await client.post(PATH, json=chat())
    assert check_error(refused, 503, "shutting down")["code"] == "draining"
    assert refused.headers["retry-after"]
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    idle = asyncio.create_task(admission.idle())
    await asyncio.sleep(0)
    assert not idle.done()
    script.allow(3)
    assert (await running).status_code == 200
    await asyncio.wait_for(idle, 20)


async def test_an_engine_that_has_failed(connect):
    client = await connect(alive=lambda: False)
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "engine failed")


async def test_request_ids(connect, script):
    client = await connect()
    script.allow(6)
    given = await client.post(PATH, json=chat(), headers={"X-Request-Id": "abc-1.2:3"})
    assert given.headers["x-request-id"] == "abc-1.2:3"
    assert given.json()["id"] == "chatcmpl-abc-1.2:3"
    strange = (await client.get("/health", headers={"X-Request-Id": "a b"})).headers["x-request-id"]
    assert strange != (await client.get("/health")).headers["x-request-id"]
    assert len(strange) == 32
