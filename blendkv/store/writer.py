"""One background thread that writes chunk KVs, behind a queue bounded by bytes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic

from blendkv.errors import StoreError
from blendkv.market.base import Use
from blendkv.market.context import current_use, using
from blendkv.store.base import HeldChunk

_log = logging.getLogger(__name__)


class BackgroundWriter(Generic[HeldChunk]):
    """Calls ``write`` for every submitted chunk, in order, on one thread that starts with the first.

    A chunk is written for whom it was submitted (`blendkv.market.context.using`).

    ``limit`` bounds the bytes of chunks that wait or are being written; a larger chunk passes alone. Failures are
    counted and kept for :meth:`drain`; the first is logged.
    """

    def __init__(self, write: Callable[[HeldChunk], None], limit: int) -> None:
        self._write = write
        self._limit = limit
        self._waiting: dict[str, tuple[HeldChunk, Use]] = {}
        self._current: HeldChunk | None = None
        self._bytes = 0
        self._failures: list[StoreError] = []
        self._closed = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self.failed = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes of K and V that wait or are being written."""
        return self._bytes

    @property
    def pending_chunks(self) -> int:
        """Chunks that wait or are being written."""
        with self._changed:
            return len(self._waiting) + (self._current is not None)

    def pending(self, key: str) -> HeldChunk | None:
        """Return the chunk under ``key`` if it waits or is being written."""
        with self._changed:
            if self._current is not None and self._current.key == key:
                return self._current
            waiting = self._waiting.get(key)
            return None if waiting is None else waiting[0]

    def submit(self, kv: HeldChunk) -> None:
        """Queue ``kv``; wait while the queue is full. A key that is queued already is not queued twice.

        Raises
        ------
        StoreError
            If the writer is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._fits(kv))
            if self._closed:
                raise StoreError("the store is closed; open it again")
            self._queue(kv)

    def offer(self, kv: HeldChunk) -> bool:
        """Queue ``kv`` if there is room now; return whether it is queued."""
        with self._changed:
            if self._closed or not self._fits(kv):
                return False
            self._queue(kv)
            return True

    def _fits(self, kv: HeldChunk) -> bool:
        return not self._bytes or self._bytes + kv.nbytes <= self._limit

    def _queue(self, kv: HeldChunk) -> None:
        if kv.key not in self._waiting:
            self._waiting[kv.key] = kv, current_use()
            self._bytes += kv.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="blendkv-store-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def cancel(self, key: str) -> bool:
        """Take ``key`` out of the queue, or wait until its write is done; return whether it was taken out."""
        with self._changed:
            waiting = self._waiting.pop(key, None)
            if waiting is not None:
                self._bytes -= waiting[0].nbytes
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._current is None or self._current.key != key)
            return waiting is not None

    def wait(self, key: str) -> None:
        """Wait until ``key`` neither waits nor is being written."""
        with self._changed:
            self._changed.wait_for(
                lambda: key not in self._waiting and (self._current is None or self._current.key != key)
            )

    def drain(self) -> list[StoreError]:
        """Wait until everything is written; return the failures since the last call."""
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes)
            failures, self._failures = self._failures, []
            return failures

    def close(self) -> list[StoreError]:
        """Drain, then end the thread."""
        failures = self.drain()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        return failures

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if not self._waiting:
                    return
                self._current, use = self._waiting.pop(next(iter(self._waiting)))
            with using(use):
                failure = self._attempt(self._current)
            with self._changed:
                if failure is not None:
                    self._failures.append(failure)
                    self.failed += 1
                self._bytes -= self._current.nbytes
                self._current = None
                self._changed.notify_all()

    def _attempt(self, kv: HeldChunk) -> StoreError | None:
        try:
            self._write(kv)
        except Exception as error:  # whatever it is, the thread must live on and the caller must learn of it
            if not self.failed:
                _log.warning("a chunk KV could not be stored in the background, later ones are only counted: %s", error)
            if isinstance(error, StoreError):
                return error
            failure = StoreError(f"chunk KV {kv.key[:12]} could not be stored ({type(error).__name__}: {error})")
            failure.__cause__ = error
            return failure
        return None
