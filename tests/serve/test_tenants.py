"""Tenants of one server: keys, collections, chunk KV of their own, and shares of the engine."""

from __future__ import annotations

import asyncio
import base64
import threading
from pathlib import Path

import httpx
import pytest
from server_process import asked, documents, serving
from serving import QUESTION, chat, check_error, until
from tiny_hub import TOPICS, open_pipeline

from blendkv.errors import InputError
from blendkv.serve.keys import Client, check_collections, client_of, read_keys
from blendkv.serve.passing import forwarded
from blendkv.serve.settings import ServeSettings
from blendkv.tenants import SALT_VARIABLE, tenant_tag

PATH = "/v1/chat/completions"
CLIENTS = {"acme-key": Client("acme"), "beta-key": Client("beta")}


@pytest.fixture(autouse=True)
def salt(monkeypatch):
    monkeypatch.setenv(SALT_VARIABLE, base64.b64encode(bytes(range(32))).decode())


def key(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {tenant}-key"}


def written(folder: Path, *lines: str) -> Path:
    path = folder / "keys"
    path.write_text("\n".join(lines))
    return path


def test_keys_are_read(tmp_path):
    path = written(tmp_path, "# tenants", "acme k1", "", "acme  k2", "beta\tk3 docs,faq")
    keys = read_keys(path)
    assert keys == {"k1": Client("acme"), "k2": Client("acme"), "k3": Client("beta", frozenset(("docs", "faq")))}
    assert ServeSettings(clients=keys).tenants == 2
    assert [client_of(given, keys) for given in (b"k2", b"k", b"", b"k3")] == [keys["k2"], None, None, keys["k3"]]
    check_collections(keys.values(), ("docs", "faq"))
    with pytest.raises(InputError, match="'beta' has a collection 'faq' in --api-keys; stores that are given: docs"):
        check_collections(keys.values(), ("docs",))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "holds no key"),
        (("acme",), "line 1: 1 words"),
        (("acme secret", "beta a b secret"), "line 2: 4 words"),
        (("acme secret", "beta secret"), "line 2: this key came before"),
        (("acme s\u00e9cret",), "the key in ASCII"),
        (("a/b secret",), "tenant 'a/b'"),
    ],
)
def test_keys_that_cannot_be_used(tmp_path, lines, message):
    with pytest.raises(InputError, match=message) as refused:
        read_keys(written(tmp_path, *lines))
    assert "cret" not in str(refused.value)


def test_keys_need_a_file_and_the_salt(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="cannot be read"):
        read_keys(tmp_path / "none")
    monkeypatch.delenv(SALT_VARIABLE)
    with pytest.raises(InputError, match=SALT_VARIABLE):
        read_keys(written(tmp_path, "acme k"))
    with pytest.raises(InputError, match="give one of them"):
        ServeSettings(api_key="k", clients=CLIENTS)


@pytest.mark.asyncio
async def test_only_keys_of_tenants_are_let_in(connect, script):
    client = await connect(clients=CLIENTS)
    script.allow(6)
    for word in ("Bearer gamma-key", "Bearer acme", "Basic acme-key"):
        check_error(await client.post(PATH, json=chat(), headers={"Authorization": word}), 401)
    for tenant in ("acme", "beta"):
        assert (await client.post(PATH, json=chat(), headers=key(tenant))).status_code == 200


@pytest.mark.asyncio
async def test_each_tenant_has_its_own_chunks(connect, tmp_path, llama):
    with open_pipeline(tmp_path / "s", llama, mode="blend:strided@0.3") as pipeline:
        client = await connect({"default": pipeline}, clients=CLIENTS)
        documents = [{"id": name, "text": text} for name, text in TOPICS.items()]
        posted = await client.post("/v1/rag/ingest", json={"documents": documents}, headers=key("acme"))
        assert posted.status_code == 200, posted.text
        computed = pipeline.library.counts.computed
        answers = []
        for tenant, more in (("acme", 0), ("beta", 2), ("beta", 0), ("acme", 0)):
            body = chat(blendkv={"collection": True, "k": 2})
            answered = await client.post(PATH, json=body, headers=key(tenant))
            assert answered.json()["blendkv"]["outcome"] == "blended"
            answers.append(answered.json()["choices"][0]["message"]["content"])
            assert pipeline.library.counts.computed - computed == more, tenant
            computed = pipeline.library.counts.computed
        assert len(set(answers)) == 1
        pipeline.store.flush()
        tags = {tenant_tag("acme"), tenant_tag("beta")}
        assert {info.recipe.tenant for info in pipeline.store.ls()} == tags
        gone = await client.delete("/v1/rag/documents/posted.jsonl:scope", headers=key("acme"))
        assert gone.json()["chunk_kv_removed"] == 2, "each tenant's"


@pytest.mark.asyncio
async def test_a_tenant_sees_its_collections_only(connect, pipeline, tmp_path, llama):
    with open_pipeline(tmp_path / "other", llama) as other:
        clients = {"acme-key": Client("acme"), "beta-key": Client("beta", frozenset(("faq",)))}
        client = await connect({"docs": pipeline, "faq": other}, clients=clients)

        async def models(tenant: str) -> list[str]:
            return [m["id"] for m in (await client.get("/v1/models", headers=key(tenant))).json()["data"]]

        assert await models("acme") == ["tiny", "tiny/rag", "tiny/rag/docs", "tiny/rag/faq"]
        assert await models("beta") == ["tiny", "tiny/rag"]
        for response in (
            await client.post(PATH, json=chat("tiny/rag/docs"), headers=key("beta")),
            await client.post(PATH, json=chat("tiny", blendkv={"collection": "docs"}), headers=key("beta")),
            await client.post("/v1/rag/query", json={"question": QUESTION, "collection": "docs"}, headers=key("beta")),
            await client.get("/v1/rag/documents", params={"collection": "docs"}, headers=key("beta")),
            await client.delete("/v1/rag/documents/x", params={"collection": "docs"}, headers=key("beta")),
        ):
            error = check_error(response, 404)
            assert "faq" in str(error["message"]) or "tiny/rag" in str(error["message"])
        listed = await client.get("/v1/rag/documents", headers=key("beta"))
        assert listed.json()["collection"] == "faq"


@pytest.mark.asyncio
async def test_a_flood_delays_another_tenant_by_what_runs_only(connect, script):
    client = await connect(clients=CLIENTS)
    door, running = connect.app.state.service.door, connect.app.state.admission
    flood = []
    for number in range(1, 13):
        flood.append(asyncio.create_task(client.post(PATH, json=chat(), headers=key("acme"))))
        await until(lambda wanted=number: running.running == wanted)
    await until(lambda: len(door) == 11)
    # The most patient class of the one tenant goes before the least patient of the other.
    single = {**chat(), "blendkv": {"collection": True, "workload": "single"}}
    quick = asyncio.create_task(client.post(PATH, json=single, headers=key("beta")))
    await until(lambda: len(door) == 12)
    script.allow(6)
    answered = await asyncio.wait_for(quick, 20)
    assert answered.status_code == 200
    assert sum(task.done() for task in flood) <= 1
    assert len(door) >= 10
    second = asyncio.create_task(client.post(PATH, json=single, headers=key("beta")))
    script.allow(3 * 12)
    responses = [await task for task in (*flood, second)]
    assert {response.status_code for response in responses} == {200}
    assert responses[-1].headers.get("x-blendkv-queued-for") in ("capacity", "share")


@pytest.mark.asyncio
async def test_a_flood_leaves_room_for_others(connect, script):
    client = await connect(clients=CLIENTS, max_requests=6)
    tasks = []
    for number in range(1, 4):
        tasks.append(asyncio.create_task(client.post(PATH, json=chat(), headers=key("acme"))))
        await until(lambda wanted=number: connect.app.state.admission.running == wanted)
    refused = await client.post(PATH, json=chat(), headers=key("acme"))
    assert check_error(refused, 429, "3 requests are running")["code"] == "too_many_requests"
    tasks += [asyncio.create_task(client.post(PATH, json=chat(), headers=key("beta"))) for _ in range(3)]
    script.allow(18)
    assert [(await task).status_code for task in tasks] == [200] * 6


@pytest.mark.asyncio
async def test_the_line_of_one_tenant_is_full(connect, script):
    client = await connect(clients=CLIENTS, queue=1)
    door, tasks = connect.app.state.service.door, []
    for waiting in (0, 1):
        tasks.append(asyncio.create_task(client.post(PATH, json=chat(), headers=key("acme"))))
        await until(lambda wanted=waiting: len(script.generations) == 1 and len(door) == wanted)
    refused = await client.post(PATH, json=chat(), headers=key("acme"))
    assert check_error(refused, 429, "queue_full")["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    tasks.append(asyncio.create_task(client.post(PATH, json=chat(), headers=key("beta"))))
    await until(lambda: len(door) == 2)
    script.allow(9)
    assert [(await task).status_code for task in tasks] == [200] * 3
    page = (await client.get("/metrics")).text
    assert 'blendkv_refused_requests_total{reason="queue_full",workload="rag"} 1.0' in page


def test_two_tenants_of_a_real_server(tmp_path, llama_folder):
    """Each ingests and asks with its own key; while one floods the door, the other waits for a few requests only."""
    keys, done = written(tmp_path, "acme acme-key", "beta beta-key"), []
    with serving(
        llama_folder, tmp_path / "s", tmp_path / "errors", "--api-keys", keys, "--max-requests", 32, BLENDKV_API_KEY=""
    ) as served:

        def post(path: str, body: dict[str, object], tenant: str) -> httpx.Response:
            return httpx.post(f"{served.url}{path}", json=body, headers=key(tenant), timeout=120)

        assert post("/v1/rag/ingest", {"documents": documents(), "chunk_tokens": 48}, "acme").status_code == 200
        body = {"model": f"{served.model}/rag", "messages": asked(), "max_tokens": 100}

        def flood() -> None:
            assert post(PATH, body, "acme").status_code == 200
            done.append(None)

        threads = [threading.Thread(target=flood) for _ in range(14)]
        for thread in threads:
            thread.start()
        while served.metric("blendkv_requests_running") + len(done) < len(threads):
            pass
        before = len(done)
        answered = post(PATH, {**body, "max_tokens": 1, "blendkv": {"workload": "single"}}, "beta")
        during = len(done) - before
        for thread in threads:
            thread.join()
        assert answered.status_code == 200, answered.text
        assert answered.headers["x-blendkv-workload"] == "single"
        assert during <= 4, "first come, first served would have had it wait for all of them"
        assert len(done) == len(threads)
        assert post(PATH, body, "gamma").status_code == 401


def test_what_is_handed_on_to_vllm_is_salted():
    body = b'{"model": "m", "cache_salt": "mine"}'
    parsed = {"model": "m", "cache_salt": "mine"}
    assert forwarded(body, parsed, "m") == body
    assert f'"cache_salt": "{tenant_tag("acme")}|mine"'.encode() in forwarded(body, parsed, "m", "acme")
    assert f'"cache_salt": "{tenant_tag("acme")}"'.encode() in forwarded(b"{}", {}, "m", "acme")
    with pytest.raises(Exception, match="kv_transfer_params is not for tenants' keys"):
        forwarded(b"", {"kv_transfer_params": {"blendkv": {"tenant": tenant_tag("beta")}}}, "m", "acme")
