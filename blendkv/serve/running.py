"""One answer in the making: what blocks runs on a thread, the pieces come to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Any

from blendkv.answer import Answer, AnswerStream
from blendkv.market.base import Use
from blendkv.market.context import using
from blendkv.observe.tracing import carried
from blendkv.serve.door import Turn


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
        Its place at the door before the engine.
    use
        Whose work it is, for the store's tiers.

    Attributes
    ----------
    answer
        The whole answer, at the end.
    """

    def __init__(self, start: Callable[[], AnswerStream], executor: Executor, turn: Turn, use: Use) -> None:
        self.answer: Answer | None = None
        self._start, self._executor = start, executor
        self._turn, self._use = turn, use

    @property
    def queued(self) -> float:
        """Seconds spent waiting for the turn."""
        return self._turn.waited

    @property
    def queued_for(self) -> str:
        """What made it wait; empty if nothing did."""
        return self._turn.reason

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Wait for the turn, then yield the text as it comes."""
        async with self._turn:
            with using(self._use):
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
