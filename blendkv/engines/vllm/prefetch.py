"""Chunk KV on its way to host memory, while the scheduler goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from blendkv.daemon.client import DaemonStore
from blendkv.daemon.reader import LentReader
from blendkv.errors import StoreError
from blendkv.market.admission import TARGETS
from blendkv.market.base import UNKNOWN, Use
from blendkv.market.context import using
from blendkv.store.door import Store
from blendkv.types import TokenIds

_log = logging.getLogger(__name__)
_THREADS = 2
_WAITERS = 16
"""Threads over a daemon's store: the daemon reads, they only wait."""


@dataclass
class _Job:
    """What one request waits for."""

    chunks: Sequence[tuple[str, TokenIds]]
    use: Use
    began: float
    dropped: threading.Event = field(default_factory=threading.Event)

    @property
    def keys(self) -> list[str]:
        return [key for key, _ in self.chunks]


class Prefetcher:
    """Reads the chunk KVs of waiting requests, each request's once, in the background.

    A chunk that was read whole is in the store's memory tier, as far as that has room, and else in the system's page
    cache: the blend that follows waits for no disk. A daemon is told of all chunks of a request at once, those of
    classes that may wait least first, and forgets what has not begun when the request is dropped.

    Parameters
    ----------
    store
        Where they are.
    seconds
        How long a request may wait.
    remembered_bytes
        Where the workers are other processes, with memory tiers of their own: how much of what was read last is taken
        for still being in memory. 0 where they share this store's memory tier, or a daemon's.
    """

    def __init__(self, store: Store, seconds: float, remembered_bytes: int = 0) -> None:
        self._store, self._seconds = store, seconds
        self._daemon = store if isinstance(store, DaemonStore) else None
        self._most, self._held = 0 if self._daemon else remembered_bytes, 0
        self._read_before: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        threads = _WAITERS if self._daemon else _THREADS
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="blendkv-prefetch")
        self._teller = ThreadPoolExecutor(1, thread_name_prefix="blendkv-prefetch-tell")  # in the order of the events
        self._running: dict[str, tuple[Future[None], _Job]] = {}

    def ready(self, request_id: str, chunks: Sequence[tuple[str, TokenIds]], use: Use) -> bool:
        """Whether the chunks (key, token ids) are in host memory; the first call starts reading what is not.

        Raises
        ------
        TimeoutError
            If it takes longer than allowed.
        StoreError
            If the store cannot be read.
        """
        known = self._running.get(request_id)
        if known is None:
            wanted = [chunk for chunk in chunks if not self._at_hand(chunk[0])]
            if not wanted:
                return True
            known = self._running[request_id] = self._start(_Job(wanted, use, time.monotonic()))
        future, job = known
        if future.done():
            future.result()
            return True
        if time.monotonic() - job.began > self._seconds:
            raise TimeoutError(f"chunk KV was not in host memory after {self._seconds:g} s")
        return False

    def drop(self, request_id: str) -> None:
        """The request needs nothing more."""
        known = self._running.pop(request_id, None)
        if known is None or known[0].done():
            return
        future, job = known
        job.dropped.set()
        future.cancel()
        if self._daemon is not None:
            needed = {key for _, other in self._running.values() for key in other.keys}
            self._teller.submit(self._cancel, self._daemon, [key for key in job.keys if key not in needed])

    def close(self) -> None:
        """Stop; what is being read is read to its end."""
        for _, job in self._running.values():
            job.dropped.set()
        self._teller.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)

    def _start(self, job: _Job) -> tuple[Future[None], _Job]:
        if self._daemon is not None:
            self._teller.submit(self._announce, self._daemon, job)
        return self._pool.submit(self._read, job), job

    def _announce(self, daemon: DaemonStore, job: _Job) -> None:
        """Tell the daemon of the chunks, each request's before they are waited for one by one."""
        if job.dropped.is_set():
            return
        try:
            with using(job.use):
                daemon.prefetch(job.keys, priority_of(job.use))
        except StoreError as error:  # whoever waits for them sees what is wrong
            _log.info("the daemon was not told of chunks that a request waits for: %s", error)

    def _cancel(self, daemon: DaemonStore, keys: Sequence[str]) -> None:
        try:
            daemon.cancel(keys)
        except StoreError as error:  # it loads what nobody needs
            _log.info("the daemon was not told of chunks that a request does not wait for: %s", error)

    def _at_hand(self, key: str) -> bool:
        with self._lock:
            if key in self._read_before:
                self._read_before.move_to_end(key)
                return True
        return self._store.in_memory(key)

    def _remember(self, key: str, nbytes: int) -> None:
        with self._lock:
            self._held += nbytes - self._read_before.pop(key, 0)
            self._read_before[key] = nbytes
            while self._held > self._most:
                self._held -= self._read_before.popitem(last=False)[1]

    def _read(self, job: _Job) -> None:
        with using(job.use):
            for key, token_ids in job.chunks:
                if job.dropped.is_set():
                    return
                try:
                    self._read_one(key, token_ids)
                except StoreError as error:  # the worker will see; a damaged chunk has been dropped
                    _log.info("chunk %s could not be read ahead: %s", key[:12], error)

    def _read_one(self, key: str, token_ids: TokenIds) -> None:
        reader = self._store.get(key, token_ids)
        if reader is None:  # gone since it was found: the worker will see
            return
        last = reader.layers - 1
        for layer in [last] if isinstance(reader, LentReader) else range(last + 1):  # a daemon loads them in order
            reader.layer(layer)
        if self._most:
            self._remember(key, reader.nbytes)


def priority_of(use: Use) -> int:
    """A daemon loads for classes that may wait least first."""
    return round(64 / TARGETS.get(use.workload, TARGETS[UNKNOWN]))
