"""Threads of the daemon that bring chunk files from slower tiers to shared memory, the most urgent first."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable

from blendkv.daemon.images import Image, LayerSource
from blendkv.errors import BlendKVError, DamagedChunkError

URGENT = 1 << 30
"""The priority of what somebody waits for."""

_log = logging.getLogger(__name__)


class Load:
    """One chunk on its way; ``done`` is called at the end, with the error if there was one.

    ``on_layer`` hears how many seconds each layer took to come.
    """

    def __init__(
        self,
        image: Image,
        source: LayerSource,
        done: Callable[[Image, BlendKVError | None], None],
        on_layer: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.image = image
        self.source = source
        self._done = done
        self._on_layer = on_layer

    def run(self) -> None:
        """Fill the image; never raises."""
        error: BlendKVError | None = None
        file = self.image.file()
        try:
            for index in range(self.image.layers):
                begun = time.perf_counter()
                self.source.fill(index, file)
                self._on_layer(time.perf_counter() - begun)
                if index + 1 < self.image.layers:
                    self.image.advance()
        except BlendKVError as failure:
            error = failure
        except Exception as failure:  # a thread of the pool must live on, and who waits must learn of it
            _log.exception("a load failed in an unforeseen way")
            error = DamagedChunkError(self.image.key, f"unreadable: {type(failure).__name__}")
        self._end(error)

    def cancel(self) -> None:
        """End it before it has begun."""
        self._end(DamagedChunkError(self.image.key, "cancelled: nobody waits for it any more"))

    def _end(self, error: BlendKVError | None) -> None:
        self.source.close()
        self._done(self.image, error)
        if error is None:
            self.image.advance()  # the last layer: the store knows before anybody sees it whole
        else:
            self.image.fail(str(error))


class Loader:
    """A pool of threads over a queue of loads by priority."""

    def __init__(self, threads: int = 4) -> None:
        self._queue: queue.PriorityQueue[tuple[int, int, str | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._waiting: dict[str, Load] = {}
        self._running = 0
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name=f"blendkv-load-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pending(self) -> int:
        """Loads that wait or run."""
        return len(self._waiting) + self._running

    def submit(self, load: Load, priority: int) -> None:
        """Queue a load. One of the same key that waits is ended: its chunk was removed, and is there anew."""
        with self._lock:
            replaced = self._waiting.pop(load.image.key, None)
            self._waiting[load.image.key] = load
        if replaced is not None:
            replaced.cancel()
        self._queue.put((-priority, next(self._order), load.image.key))

    def hasten(self, key: str, priority: int) -> None:
        """Let a load that waits go first; a second place in the queue, the first to come up counts."""
        with self._lock:
            if key not in self._waiting:
                return
        self._queue.put((-priority, next(self._order), key))

    def cancel(self, key: str) -> bool:
        """End a load that waits; return whether it did."""
        with self._lock:
            load = self._waiting.pop(key, None)
        if load is None:
            return False
        load.cancel()
        return True

    def close(self) -> None:
        """End what waits, and the threads when they are done with what they do."""
        with self._lock:
            waiting = list(self._waiting)
        for key in waiting:
            self.cancel(key)
        for _ in self._threads:
            self._queue.put((1 << 62, next(self._order), None))
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            key = self._queue.get()[2]
            if key is None:
                return
            with self._lock:
                load = self._waiting.pop(key, None)
                self._running += load is not None
            if load is None:
                continue
            load.run()
            del load  # or its memory would not be free as long as this thread waits for the next
            with self._lock:
                self._running -= 1
