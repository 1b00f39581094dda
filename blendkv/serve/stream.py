"""Server-sent events that end cleanly: with the client gone, out of time, or with an error in the middle."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from blendkv.serve.errors import ApiError

MEDIA_TYPE = "text/event-stream"


class EventStream(StreamingResponse):
    """A stream of server-sent events, of which the first is there; their generator is closed whatever ends it."""

    def __init__(self, first: str, events: AsyncGenerator[str, None], headers: Mapping[str, str]) -> None:
        kept = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(_behind(first, events), headers=kept, media_type=MEDIA_TYPE)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _behind(first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    yield first
    async for event in events:
        yield event


def error_event(error: ApiError) -> str:
    """An error in the middle of a stream, as OpenAI's clients expect it."""
    return f"data: {json.dumps(error.body)}\n\n"
