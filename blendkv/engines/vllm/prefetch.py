"""Chunk KV on its way to host memory, while the scheduler goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from blendkv.errors import StoreError
from blendkv.store.door import Store
from blendkv.types import TokenIds

_log = logging.getLogger(__name__)
_THREADS = 2


class Prefetcher:
    """Reads the chunk KVs of waiting requests, each request's once, in the background.

    A chunk that was read whole is in the store's memory tier, as far as that has room, and else in the system's page
    cache: the blend that follows waits for no disk.

    Parameters
    ----------
    store
        Where they are.
    seconds
        How long a request may wait.
    remembered_bytes
        Where the workers are other processes, with memory tiers of their own: how much of what was read last is taken
        for still being in memory. 0 where they share this store's memory tier.
    """

    def __init__(self, store: Store, seconds: float, remembered_bytes: int = 0) -> None:
        self._store, self._seconds = store, seconds
        self._most, self._held = remembered_bytes, 0
        self._read_before: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="blendkv-prefetch")
        self._running: dict[str, tuple[Future[None], float]] = {}

    def ready(self, request_id: str, chunks: Sequence[tuple[str, TokenIds]]) -> bool:
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
            known = self._running[request_id] = self._pool.submit(self._read, wanted), time.monotonic()
        future, began = known
        if future.done():
            future.result()
            return True
        if time.monotonic() - began > self._seconds:
            raise TimeoutError(f"chunk KV was not in host memory after {self._seconds:g} s")
        return False

    def drop(self, request_id: str) -> None:
        """The request needs nothing more."""
        known = self._running.pop(request_id, None)
        if known is not None:
            known[0].cancel()

    def close(self) -> None:
        """Stop; what is being read is read to its end."""
        self._pool.shutdown(cancel_futures=True)

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

    def _read(self, chunks: Sequence[tuple[str, TokenIds]]) -> None:
        for key, token_ids in chunks:
            reader = self._store.get(key, token_ids)
            if reader is None:  # gone since it was found: the worker will see
                continue
            try:
                for layer in range(reader.layers):
                    reader.layer(layer)
                if self._most:
                    self._remember(key, reader.nbytes)
            except StoreError as error:  # likewise; a damaged chunk has been dropped
                _log.info("chunk %s could not be read ahead: %s", key[:12], error)
