"""Who waits at the door before the engine, for what, and what the response says of it; on a scripted engine."""

from __future__ import annotations

import asyncio
import math
import random

import pytest
from serving import chat, check_error, until

from blendkv.market.admission import AdmissionQueue, Applicant
from blendkv.serve.settings import ServeSettings

pytestmark = pytest.mark.asyncio
PATH = "/v1/chat/completions"


def conversation() -> dict[str, object]:
    turns = [("user", "Hello"), ("assistant", "Hello!"), ("user", "What does nonlocal do?")]
    return {"model": "tiny/rag", "messages": [{"role": role, "content": text} for role, text in turns]}


@pytest.mark.parametrize(
    ("body", "headers", "said"),
    [
        (chat(), {}, "rag; inferred"),
        (chat(model="tiny"), {}, "single; inferred"),
        (conversation(), {}, "chat; inferred"),
        (chat(blendkv={"collection": True, "workload": "agent"}, model="tiny"), {}, "agent"),
        (chat(blendkv={"workload": "agent"}), {"X-BlendKV-Workload": "batch/night"}, "batch/night"),
    ],
)
async def test_the_class_is_read_or_inferred_and_said(connect, script, body, headers, said):
    client = await connect()
    script.allow(6)
    for stream in (False, True):
        answered = await client.post(PATH, json={**body, "stream": stream}, headers=headers)
        assert answered.status_code == 200, answered.text
        assert answered.headers["x-blendkv-workload"] == said
        assert float(answered.headers["x-blendkv-queued-seconds"]) >= 0
        assert "x-blendkv-queued-for" not in answered.headers


async def test_a_class_that_is_no_word_is_refused(connect, script):
    client = await connect()
    refused = await client.post(PATH, json=chat(), headers={"X-BlendKV-Workload": "an agent"})
    check_error(refused, 400, "'an agent'", "letters", param="blendkv.workload")
    check_error(await client.post(PATH, json=chat(blendkv={"session": ""})), 400, param="blendkv.session")
    assert not script.generations


async def line_up(client, app, bodies: list[dict[str, object]]) -> list[asyncio.Task]:
    """Send requests one after the other; the first one has the engine, the others wait."""
    tasks = []
    for number, body in enumerate(bodies, 1):
        tasks.append(asyncio.create_task(client.post(PATH, json=body)))
        await until(lambda wanted=number: app.state.admission.running == wanted)
        await until(lambda wanted=number: len(app.state.service.door) == wanted - 1)
    return tasks


@pytest.mark.parametrize("fifo", [False, True])
async def test_a_chat_goes_before_single_shots_that_came_earlier(connect, script, fifo):
    settings = {"targets": None} if fifo else {"targets": {"chat": 1.0, "single": 1e6, "unknown": 1.0}}
    client = await connect(**settings)
    singles = [chat(blendkv={"workload": "single", "collection": True}) for _ in range(3)]
    tasks = await line_up(client, connect.app, [*singles, conversation()])
    for _ in range(2):
        script.allow(3)
        await until(lambda: sum(task.done() for task in tasks) == len(script.generations) - 1 or tasks[3].done())
        await asyncio.sleep(0.02)
    await until(lambda: sum(task.done() for task in tasks) == 2)
    assert [task.done() for task in tasks] == ([True, True, False, False] if fifo else [True, False, False, True])
    script.allow(6)
    answers = [await task for task in tasks]
    assert [answer.status_code for answer in answers] == [200] * 4
    why = [answer.headers.get("x-blendkv-queued-for") for answer in answers]
    assert why == [None, "capacity", "capacity", "capacity"]
    assert answers[3].json()["blendkv"]["queued_for"] == "capacity"
    page = (await client.get("/metrics")).text
    workload = "unknown" if fifo else "single"
    assert f'blendkv_queue_seconds_count{{reason="capacity",workload="{workload}"}} {3 if fifo else 2}.0' in page


async def test_first_come_first_served_knows_no_sessions_and_no_classes():
    seed = 3
    rng, door = random.Random(seed), AdmissionQueue(ServeSettings(targets=None).admission(1))
    coming, now, arrived, served = 0, 0.0, [], []
    for _ in range(400):
        now += rng.expovariate(1.0)
        if rng.random() < 0.5 + 0.4 * math.sin(coming / 20):
            workload, session = rng.choice(["agent", "single", "x"]), rng.choice(["", "s", "t"])
            door.offer(Applicant(str(coming), workload, "", now, rng.uniform(0.1, 30.0), session=session))
            arrived.append(str(coming))
            coming += 1
        elif (taken := door.next(now)) is not None:
            served.append(taken.id)
    assert len(served) > 50, seed
    assert served == arrived[: len(served)], seed


async def test_what_waits_behind_a_class_with_less_patience_says_so(connect, script):
    client = await connect(targets={"chat": 1.0, "single": 10.0, "unknown": 1.0})
    single = chat(blendkv={"workload": "single", "collection": True})
    tasks = await line_up(client, connect.app, [conversation(), conversation(), single])
    script.allow(9)
    assert [(await task).headers.get("x-blendkv-queued-for") for task in tasks] == [None, "capacity", "class"]


async def test_who_would_wait_too_long_is_told_when_to_come_again(connect, script):
    client = await connect(patience=1.5)  # a request counts as a second of work before any is known
    tasks = await line_up(client, connect.app, [chat(), chat(), chat()])
    refused = await client.post(PATH, json=chat())
    assert check_error(refused, 429, "come again in 1 s")["code"] == "overloaded"
    assert refused.headers["retry-after"] == "1"
    streamed = await client.post(PATH, json=chat(stream=True))
    check_error(streamed, 429)
    script.allow(9)
    assert [(await task).status_code for task in tasks] == [200] * 3
    page = (await client.get("/metrics")).text
    assert 'blendkv_refused_requests_total{reason="overloaded",workload="rag"} 2.0' in page


async def test_a_place_in_the_line_is_given_up_with_its_request(connect, script):
    client = await connect(request_timeout=0.4)
    tasks = await line_up(client, connect.app, [chat(), chat()])
    for task in tasks:
        check_error(await task, 504)
    await until(lambda: len(connect.app.state.service.door) == 0)
    script.allow(3)
    async with asyncio.timeout(20):
        while (await client.post(PATH, json=chat())).status_code != 200:
            pass


async def test_several_slots(connect, script):
    client = await connect(slots=2)
    tasks = [asyncio.create_task(client.post(PATH, json=chat())) for _ in range(3)]
    await until(lambda: len(script.generations) == 2)
    await until(lambda: len(connect.app.state.service.door) == 1)
    script.allow(9)
    assert [(await task).status_code for task in tasks] == [200] * 3
