"""Sends the live load to one server, open loop: every request at its time, whatever the earlier ones do."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from blendkv.eval.bench.market_live_load import Ask, ask_body

_TIMEOUT = 300.0


@dataclass(frozen=True)
class Sending:
    """Where requests go, and how they are answered."""

    url: str
    model: str
    mode: str
    answer_tokens: int


@dataclass(frozen=True)
class Seen:
    """What a client saw of a request.

    Attributes
    ----------
    ttft
        Seconds from the time at which it was to be sent to the first piece of the answer; waiting included.
    text
        The answer.
    told
        The response's field ``blendkv``.
    hint
        What became of its session's hint: ``heard`` or ``not heard`` by a policy, ``late`` (the next turn had been sent
        by then), or empty if there was none.
    error
        Why there is no answer; empty if there is one.
    """

    ttft: float = 0.0
    text: str = ""
    told: dict[str, Any] | None = None
    hint: str = ""
    error: str = ""


def drive(sending: Sending, asks: Sequence[Ask]) -> list[Seen]:
    """Send all at their times, hints after their answers; in the order of ``asks``."""
    return asyncio.run(_all(sending, asks))


async def _all(sending: Sending, asks: Sequence[Ask]) -> list[Seen]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=sending.url, timeout=_TIMEOUT, limits=limits) as client:
        driving = _Driving(sending, client)
        return await asyncio.gather(*(driving.one(ask) for ask in asks))


class _Driving:
    def __init__(self, sending: Sending, client: httpx.AsyncClient) -> None:
        self._sending, self._client = sending, client
        self._latest: Counter[str] = Counter()  # the last turn sent, by session
        self._began = time.perf_counter()

    async def one(self, ask: Ask) -> Seen:
        due = self._began + ask.at
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if ask.use.session:
            self._latest[ask.use.session] = ask.turn
        try:
            ttft, text, told = await self._answer(ask, due)
            hint = await self._hint(ask)
        except (httpx.HTTPError, _RefusedError) as error:
            return Seen(error=f"{type(error).__name__}: {error}")
        return Seen(ttft, text, told, hint)

    async def _answer(self, ask: Ask, due: float) -> tuple[float, str, dict[str, Any]]:
        sending = self._sending
        body = ask_body(ask, sending.model, sending.mode, sending.answer_tokens)
        session = {"X-BlendKV-Session": ask.use.session} if ask.use.session else {}
        headers = {"X-BlendKV-Workload": ask.use.workload, **session}
        first: float | None = None
        text = ""
        told: dict[str, Any] = {}
        async with self._client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                raise _RefusedError(f"{response.status_code}: {(await response.aread()).decode()[:300]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise _RefusedError(str(event["error"])[:300])
                first = first or time.perf_counter()
                text += event["choices"][0]["delta"].get("content") or ""
                told = event.get("blendkv", told)
        if first is None or not told:
            raise _RefusedError("the stream ended without an answer")
        return first - due, text, told

    async def _hint(self, ask: Ask) -> str:
        """Say what the session does next, unless it has done it already."""
        session = ask.use.session
        if ask.hint is None:
            return ""
        if self._latest[session] != ask.turn:
            return "late"
        told: dict[str, Any] = {"session": session, "what": ask.hint}
        if ask.hint == "tool_started":
            told["ttl"] = ask.ttl
        response = await self._client.post("/v1/blendkv/hint", json=told)
        if response.status_code != 200:
            raise _RefusedError(f"a hint got {response.status_code}: {response.text[:300]}")
        return "heard" if response.json()["listening"] else "not heard"


class _RefusedError(Exception):
    """The server did not answer a request."""
