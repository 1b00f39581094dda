"""Bodies of requests to the server, and what its errors must look like."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx

QUESTION = "What does the nonlocal statement do?"


def chat(model: str = "tiny/rag", question: str = QUESTION, **fields: object) -> dict[str, object]:
    """The body of a chat request."""
    return {"model": model, "messages": [{"role": "user", "content": question}], **fields}


def check_error(response: httpx.Response, status: int, *words: str, param: str | None = None) -> dict[str, object]:
    """An error in OpenAI's shape; returns it."""
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["message"] == " ".join(error["message"].split())
    for word in words:
        assert word in error["message"], error["message"]
    if param is not None:
        assert error["param"] == param
    return error


async def until(condition: Callable[[], object]) -> None:
    """Wait until something is so, 20 seconds at most."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)
