"""One answer in the making: what blocks runs on a thread, the pieces come to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any

from blendkv.answer import Answer, AnswerStream
from blendkv.observe.tracing import carried


class Running:
    """Iterate `pieces`, once, for the text; afterwards ``answer`` is known.

    Closing the iteration early makes the engine stop at its next token; an answer that has not had its turn yet is not
    started.

    Parameters
    ----------
    start
        Retrieves, blends and returns the stream. It blocks, and so runs on a thread of ``executor``.
    executor
        Runs ``start``.
    turn
        The queue of an engine that runs one request at a time, first come, first served; None for an engine that
        queues by itself.

    Attributes
    ----------
    queued
        Seconds spent waiting for the turn.
    answer
        The whole answer, at the end.
    """

    def __init__(
        self, start: Callable[[], AnswerStream], executor: Executor, turn: asyncio.Semaphore | None = None
    ) -> None:
        self.queued = 0.0
        self.answer: Answer | None = None
        self._start, self._executor = start, executor
        self._turn: AbstractAsyncContextManager[Any] = nullcontext() if turn is None else turn

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Wait for the turn, then yield the text as it comes."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with self._turn:
            self.queued = loop.time() - began
            starting = self._executor.submit(carried(self._start))
            try:
                stream = await asyncio.wrap_future(starting)
            except asyncio.CancelledError:
                starting.add_done_callback(_close)
                raise
            async with aclosing(aiter(stream)) as pieces:
                async for piece in pieces:
                    yield piece
            self.answer = stream.answer


def _close(started: Any) -> None:
    """Stop a stream that nobody waits for any more."""
    if not started.cancelled() and started.exception() is None:
        started.result().close()
