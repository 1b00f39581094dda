"""Calls that may hang, on threads that nobody waits for longer than agreed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class ExpiredError(Exception):
    """A call did not end in time; ``started`` tells whether it began at all."""

    def __init__(self, started: bool) -> None:
        super().__init__()
        self.started = started


class SaturatedError(Exception):
    """Every thread is stuck in a call whose caller has left."""


class Call:
    """A function on its way through the pool."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.started = self.abandoned = False


class CallPool:
    """A few daemon threads that run calls for callers who will not wait for long.

    A call that outlasts its caller keeps its thread until it ends; ``threads`` of them, and further calls fail at once.
    A call whose caller left before it began is not run.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name, self._most = name, threads
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._busy = 0
        self._closed = False
        self.stuck = 0
        """Threads whose caller has left."""

    def run(self, function: Callable[[], T], seconds: float) -> T:
        """Return or raise what ``function`` does.

        Raises
        ------
        ExpiredError
            If it takes longer than ``seconds``, counted from now.
        SaturatedError
            If no thread can be had.
        """
        call = self.start(function)
        ended = False
        try:
            ended = call.done.wait(seconds)
        finally:  # also when the waiting itself is interrupted
            if not ended:
                ended = not self.abandon(call)
        if not ended:
            raise ExpiredError(call.started)
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def start(self, function: Callable[[], Any]) -> Call:
        """Queue a call without waiting for it; `abandon` it if it takes too long.

        Raises
        ------
        SaturatedError
            If no thread can be had.
        """
        call = Call(function)
        with self._lock:
            if self._closed or self.stuck >= self._most:
                raise SaturatedError
            self._busy += 1
            if self._busy > self._threads and self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()
            self._queue.put(call)
        return call

    def abandon(self, call: Call) -> bool:
        """Leave a call alone; False if it has ended."""
        with self._lock:
            if call.done.is_set():
                return False
            call.abandoned = True
            self.stuck += call.started
            return True

    def close(self) -> None:
        """Let the threads end when they are done; none is waited for."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._threads):
                    self._queue.put(None)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            self._run(call)
            del call  # what it returned is the caller's alone, while this thread waits for the next

    def _run(self, call: Call) -> None:
        with self._lock:
            if call.abandoned:
                self._busy -= 1
                return
            call.started = True
        try:
            call.result = call.function()
        except BaseException as error:  # handed to who waits for it
            call.error = error
        with self._lock:
            self._busy -= 1
            self.stuck -= call.abandoned
            call.done.set()
