"""`blendkv serve` in a process of its own, and what every engine's server must do with real clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from prometheus_client.parser import text_string_to_metric_families
from serving import QUESTION
from tiny_hub import TOPICS

KEY = "sesame"
COMMAND = [sys.executable, "-c", "from blendkv.cli.main import main; main()"]
RAG: dict[str, Any] = {"collection": True}


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[str]
    url: str
    model: str
    store: Path
    errors: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, timeout=120, max_retries=0)

    @property
    def asynchronous(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, timeout=120, max_retries=0)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Post to an endpoint that OpenAI's client does not know."""
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=120)


@contextmanager
def serving(model: Path, store: Path, errors: Path, *options: object, **variables: str) -> Iterator[Served]:
    """Start a server on a free port, wait until it is ready, and end it; ``variables`` are of its environment."""
    fixed = ("--model", model, "--store", store, "--port", 0, "--json", "--max-tokens", 8, "--top-k", 2)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "BLENDKV_API_KEY": KEY, **variables}
    with errors.open("w") as log:
        process = subprocess.Popen(
            [*COMMAND, "serve", *(str(o) for o in (*fixed, *options))], stdout=subprocess.PIPE, stderr=log, text=True,
            env=environment,
        )  # fmt: skip
    watchdog = threading.Timer(240, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            line = process.stdout.readline()
            assert line, f"the server ended: {errors.read_text()}"
            lines.append(line)
        row = json.loads("".join(lines))["rows"][0]
        yield Served(process, row["url"], row["models"][0], store, errors)
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.stdout.close()


def documents() -> list[dict[str, Any]]:
    """The topics as documents to post."""
    return [{"id": name, "text": text, "metadata": {"topic": name}} for name, text in TOPICS.items()]


def check_ingest(served: Served) -> None:
    """Documents are posted and found."""
    report = served.post("/v1/rag/ingest", {"documents": documents(), "chunk_tokens": 48})
    assert report.status_code == 200, report.text
    assert report.json()["documents"]["added"] == len(TOPICS)
    found = served.post("/v1/rag/query", {"question": QUESTION, "k": 1}).json()
    assert found["blendkv"]["sources"][0]["document"] == "posted.jsonl:scope"
    assert found["blendkv"]["outcome"] == "blended", found
    health = httpx.get(f"{served.url}/health").json()
    assert (health["status"], health["stores"]) == ("ready", ["default"])


def asked(text: str = QUESTION) -> Any:
    return [{"role": "user", "content": text}]


def check_openai(served: Served) -> None:
    """OpenAI's own client: whole and streamed, usage, completions, errors."""
    client, model = served.client, served.model
    assert [m.id for m in client.models.list()] == [model, f"{model}/rag"]
    named = client.chat.completions.create(model=f"{model}/rag", messages=asked(), temperature=0)
    field = {"blendkv": {**RAG, "mode": "blend:head_query@0.05", "k": 2}}
    extra = client.chat.completions.create(model=model, messages=asked(), temperature=0, extra_body=field)
    assert named.choices[0].message.content == extra.choices[0].message.content
    assert named.model_extra is not None
    assert named.model_extra["blendkv"]["outcome"] == "blended"
    assert named.usage is not None
    assert named.usage.prompt_tokens_details is not None
    assert named.usage.prompt_tokens_details.cached_tokens
    plain = client.chat.completions.create(model=model, messages=asked(), temperature=0, max_tokens=5)
    assert "blendkv" not in (plain.model_extra or {})
    assert plain.usage is not None
    assert plain.usage.completion_tokens <= 5

    options: Any = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    for name, whole in ((f"{model}/rag", named), (model, plain)):
        chunks = list(client.chat.completions.create(model=name, messages=asked(), max_tokens=8, **options))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text.startswith(whole.choices[0].message.content or "")
        assert chunks[-1].usage is not None
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
    completed = client.completions.create(model=model, prompt="The with statement", temperature=0, max_tokens=4)
    assert completed.usage is not None
    assert completed.usage.completion_tokens <= 4
    raw = client.chat.completions.with_raw_response.create(
        model=f"{model}/rag", messages=asked(), extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["x-blendkv-outcome"] == "blended"


def check_openai_errors(served: Served) -> None:
    """Errors arrive as the exceptions of OpenAI's client."""
    client, model = served.client, served.model
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError, match=r"there is no model|does not exist"):
        client.chat.completions.create(model="gpt", messages=asked())
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=f"{model}/rag", messages=asked(), n=2)
    assert refused.value.param == "n"
    with pytest.raises(openai.APIStatusError) as long:
        client.chat.completions.create(model=f"{model}/rag", messages=asked("word " * 3000), stream=True)
    assert (long.value.status_code, long.value.code) == (413, "context_length_exceeded")


def check_langchain(served: Served) -> None:
    """LangChain's ChatOpenAI, unchanged."""
    chat = ChatOpenAI(model=f"{served.model}/rag", base_url=f"{served.url}/v1", api_key=KEY, temperature=0)  # type: ignore[arg-type]
    turns = [("system", "Be brief."), ("human", "What is a lambda?"), ("ai", "A function."), ("human", "And its body?")]
    answer = chat.invoke(turns)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] > 0
    assert "".join(str(piece.content) for piece in chat.stream(turns)) == answer.content
    assert asyncio.run(chat.ainvoke(turns)).content == answer.content


def check_sixteen_at_once(served: Served) -> None:
    """Sixteen mixed requests: each gets what it gets alone, and the counters add up."""
    questions = [f"What is {topic}?" for topic in list(TOPICS)[:4]]
    client, model = served.client, served.model

    def ask(number: int) -> dict[str, Any]:
        name = model if number % 4 == 3 else f"{model}/rag"
        return {"model": name, "messages": asked(questions[number % 3]), "temperature": 0, "max_tokens": 6}

    alone = [client.chat.completions.create(**ask(n)).choices[0].message.content for n in range(12)]
    before = {o: served.metric("blendkv_requests_total", outcome=o) for o in ("blended", "plain", "error")}

    async def one(number: int) -> str:
        async with served.asynchronous as clients:
            if number % 2:
                stream = await clients.chat.completions.create(**ask(number), stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
            return (await clients.chat.completions.create(**ask(number))).choices[0].message.content or ""

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one(n) for n in range(16)))

    assert asyncio.run(all_of_them()) == [alone[n % 12] for n in range(16)]
    after = {o: served.metric("blendkv_requests_total", outcome=o) for o in before}
    assert {o: after[o] - before[o] for o in before} == {"blended": 12, "plain": 4, "error": 0}


def check_outage(served: Served, in_this_process: bool = True) -> None:
    """Chunk files are taken away and something unreadable stands in their place; then they come back.

    ``in_this_process``: the server itself reads the chunks, so that its own counters tell of the outage.
    """

    def ask() -> tuple[str, str]:
        body = served.client.chat.completions.create(model=f"{served.model}/rag", messages=asked(), temperature=0)
        assert body.model_extra is not None
        return body.choices[0].message.content or "", body.model_extra["blendkv"]["outcome"]

    def chunks(event: str) -> float:
        return served.metric("blendkv_library_chunks_total", event=event)

    healthy = ask()
    assert healthy[1] == "blended"
    before = chunks("computed")
    kv, away = served.store / "kv", served.store.parent / "away"
    kv.rename(away)
    kv.write_text("not a folder")
    during = [ask() for _ in range(3)]
    assert {outcome for _, outcome in during} <= {"blended", "fallback"}
    assert served.process.poll() is None
    assert "is damaged (unreadable" in served.errors.read_text()
    if in_this_process:
        assert during == [healthy] * 3, "what cannot be read is computed"
        assert chunks("computed") > before
        assert served.metric("blendkv_store_damaged_total", tier="disk") > 0
        assert served.metric("blendkv_store_write_errors_total") > 0
    kv.unlink()
    away.rename(kv)
    ask()  # what is missing is computed and stored again
    hits, again = chunks("hits"), chunks("computed")
    assert ask() == healthy
    if in_this_process:
        assert chunks("computed") == again
        assert chunks("hits") > hits


def check_sigterm(served: Served) -> None:
    """A stream that runs at SIGTERM ends complete; new requests are refused; the exit code is 0."""
    stream = served.client.chat.completions.create(
        model=f"{served.model}/rag",
        messages=asked(),
        stream=True,
        max_tokens=200,
        stream_options={"include_usage": True},
    )
    chunks = [next(iter(stream))]
    served.process.send_signal(signal.SIGTERM)
    chunks += list(stream)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0
    assert served.process.wait(30) == 0, served.errors.read_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.url}/health")
    assert "Traceback" not in served.errors.read_text()
