"""Threads of the daemon that bring chunk files from slower tiers to shared memory, the most urgent first.

Among loads as urgent as each other the first layers of all come first: an engine that waits for a prompt's chunks needs
layer 0 of every one of them before it needs layer 1 of any.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable

from blendkv.daemon.images import Image, LayerSource
from blendkv.errors import BlendKVError, DamagedChunkError

URGENT = 1 << 30
"""The priority of what somebody waits for."""
IDLE = -(1 << 30)
"""The priority of what may wait for all else."""

_log = logging.getLogger(__name__)


class Load:
    """One chunk on its way; ``done`` is called at the end, with the error if there was one.

    ``on_layer`` hears how many seconds each layer took to come. ``priority`` is the loader's to set.
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
        self.layer = 0
        """The next to come."""
        self.priority = 0
        self.taken = False
        """Whether a thread is at it, or it is over."""
        self._done = done
        self._on_layer = on_layer

    def step(self) -> bool:
        """Fill the next layer; return whether there are more. Never raises."""
        error: BlendKVError | None = None
        try:
            begun = time.perf_counter()
            self.source.fill(self.layer, self.image.file())
            self._on_layer(time.perf_counter() - begun)
            self.layer += 1
            if self.layer < self.image.layers:
                self.image.advance()
                return True
        except BlendKVError as failure:
            error = failure
        except Exception as failure:  # a thread of the pool must live on, and who waits must learn of it
            _log.exception("a load failed in an unforeseen way")
            error = DamagedChunkError(self.image.key, f"unreadable: {type(failure).__name__}")
        self._end(error)
        return False

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
    """A pool of threads over a queue of loads by priority, then by layer."""

    def __init__(self, threads: int = 4) -> None:
        self._queue: queue.PriorityQueue[tuple[int, int, int, weakref.ref[Load] | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._waiting: dict[str, Load] = {}
        self._begun: dict[str, Load] = {}
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name=f"blendkv-load-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pending(self) -> int:
        """Loads that wait or run."""
        return len(self._waiting) + len(self._begun)

    def submit(self, load: Load, priority: int) -> None:
        """Queue a load. One of the same key that waits is ended: its chunk was removed, and is there anew."""
        load.priority = priority
        with self._lock:
            replaced = self._waiting.pop(load.image.key, None)
            self._waiting[load.image.key] = load
            self._enqueue(load)
        if replaced is not None:
            self._cancel(replaced)

    def hasten(self, key: str, priority: int) -> None:
        """Let a load go first that waits or has begun; of its two places in the queue the first to come up counts."""
        with self._lock:
            load = self._waiting.get(key) or self._begun.get(key)
            if load is None or load.priority >= priority:
                return
            load.priority = priority
            if not load.taken:  # else its next place has the new priority
                self._enqueue(load)

    def cancel(self, key: str) -> bool:
        """End a load that waits; return whether it did."""
        with self._lock:
            load = self._waiting.pop(key, None)
        if load is None:
            return False
        self._cancel(load)
        return True

    def close(self) -> None:
        """End what waits, and the threads when they are done with what they do."""
        with self._lock:
            waiting = list(self._waiting)
        for key in waiting:
            self.cancel(key)
        for _ in self._threads:
            self._queue.put((1 << 62, 0, next(self._order), None))
        for thread in self._threads:
            thread.join()

    def _enqueue(self, load: Load) -> None:
        # Weakly: a place that was overtaken must not hold the memory of a chunk that has left.
        self._queue.put((-load.priority, load.layer, next(self._order), weakref.ref(load)))

    def _cancel(self, load: Load) -> None:
        load.taken = True
        load.cancel()

    def _run(self) -> None:
        while True:
            _, layer, _, place = self._queue.get()
            if place is None:
                return
            load = place()
            if load is not None and self._take(load, layer):
                self._put_back(load, load.step())
            del load  # or its memory would not be free as long as this thread waits for the next

    def _take(self, load: Load, layer: int) -> bool:
        """Whether the load is this thread's to take a step on: not from a place in the queue that was overtaken."""
        with self._lock:
            if load.taken or load.layer != layer:
                return False
            key = load.image.key
            if not layer:
                if self._waiting.get(key) is not load:
                    return False
                del self._waiting[key]
                self._begun[key] = load
            load.taken = True
            return True

    def _put_back(self, load: Load, more: bool) -> None:
        with self._lock:
            if more:
                load.taken = False
                self._enqueue(load)
            elif self._begun.get(load.image.key) is load:
                del self._begun[load.image.key]
