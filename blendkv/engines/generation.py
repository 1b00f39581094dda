"""One answer in flight, for blocking and for asynchronous readers."""

from __future__ import annotations

import asyncio
import queue
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from typing import Any

from blendkv.engines.base import Outcome
from blendkv.errors import InputError


@dataclass(frozen=True)
class End:
    """The last thing a `Generation` hears of a complete answer: its finish reason."""

    finish_reason: str


class Generation(ABC):
    """One answer in flight. Iterate, once, with ``for`` or ``async for``, for text pieces; then all is known.

    Attributes
    ----------
    tokens, text
        What was decoded: token ids (one that ends the answer included), and text up to a stop string.
    first_token_at
        `time.perf_counter` at the first token.
    finish_reason
        ``stop``, ``length`` (of `GenerationOptions`, or of the model's context), or ``cancelled``.
    outcome
        What was done for it; final once the answer is.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.first_token_at: float | None = None
        self.finish_reason = "cancelled"
        self.outcome = outcome
        self._begun = False

    @abstractmethod
    def _start(self, put: Callable[[Any], None]) -> None:
        """Begin to decode elsewhere; ``put`` each piece of text, then an `End` or the exception that ended it."""

    @abstractmethod
    def cancel(self) -> None:
        """End the answer early, from any thread; reading it then ends soon. Nothing happens when it is over."""

    @abstractmethod
    def _join(self) -> None:
        """Wait until nothing runs any more."""

    def _begin(self, put: Callable[[Any], None]) -> None:
        if self._begun:
            raise InputError("an answer can be read once; ask again for another one")
        self._begun = True
        self._start(put)

    def _read(self, item: Any) -> str | None:
        """The text of what came; None at the end."""
        if isinstance(item, End):
            self.finish_reason = item.finish_reason
            return None
        if isinstance(item, BaseException):
            raise item
        self.text += item
        return str(item)

    def __iter__(self) -> Generator[str, None, None]:
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._begin(items.put)
        try:
            while (piece := self._read(items.get())) is not None:
                if piece:
                    yield piece
        finally:
            self.cancel()
            self._join()

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[Any] = asyncio.Queue()

        def put(item: Any) -> None:
            if not loop.is_closed():  # a reader that is gone needs nothing more
                loop.call_soon_threadsafe(items.put_nowait, item)

        self._begin(put)
        try:
            while (piece := self._read(await items.get())) is not None:
                if piece:
                    yield piece
        finally:
            self.cancel()
