"""The event loop that vLLM's asynchronous engine lives on, called from other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from blendkv.errors import InputError

Result = TypeVar("Result")


class EngineLoop:
    """An event loop in a thread of its own, or one of the caller's that is running.

    Parameters
    ----------
    loop
        The caller's; it is not stopped here. None makes one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread: threading.Thread | None = None
        if loop is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="blendkv-vllm", daemon=True)
            self._thread.start()

    @property
    def here(self) -> bool:
        """Whether the caller runs on the loop."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run ``coroutine`` on the loop and wait for its result.

        Raises
        ------
        InputError
            If the caller runs on the loop, which would wait for itself for ever, or the loop is closed.
        """
        if self.here or self._loop.is_closed():
            coroutine.close()
            raise InputError(
                "the engine is closed" if self._loop.is_closed() else
                "this call blocks, and runs on the engine's own event loop: use the async variant, or another thread"
            )  # fmt: skip
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(
        self, coroutine: Coroutine[Any, Any, Result], ended: Callable[[asyncio.Task[Result]], None]
    ) -> Callable[[], None]:
        """Start ``coroutine`` on the loop, and call ``ended`` there with its task at the end, cancelled or not.

        Returns what cancels it, from any thread.
        """
        task: asyncio.Task[Result] | None = None
        cancelled = False

        def begin() -> None:
            nonlocal task
            task = self._loop.create_task(coroutine)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(ended)
            if cancelled:
                task.cancel()

        def stop() -> None:
            if task is not None:
                task.cancel()

        def cancel() -> None:
            nonlocal cancelled
            cancelled = True
            with suppress(RuntimeError):  # the loop is closed, and with it all that ran on it
                self._loop.call_soon_threadsafe(stop)

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:
            coroutine.close()
            raise InputError("the engine is closed") from None
        return cancel

    def close(self, last: Callable[[], None]) -> None:
        """Cancel what was started here, run ``last`` on the loop, and stop the loop. A loop of the caller's goes on."""
        if self._thread is None or self._loop.is_closed():
            return

        async def end() -> None:
            await _cancelled(self._tasks)
            last()
            await _cancelled(asyncio.all_tasks() - {asyncio.current_task()})

        try:
            self.call(end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancelled(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks and wait for their end."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
