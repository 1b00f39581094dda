"""The remote tiers of a store: looked up all at once, written in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Generic

from blendkv.errors import DamagedChunkError, StoreError, TierUnavailableError
from blendkv.store.base import HeldChunk
from blendkv.store.chunkfile import parse_header
from blendkv.store.guard import GuardedTier, RemoteStat
from blendkv.store.remote import Head
from blendkv.store.remote_reader import RemoteReader
from blendkv.store.writer import BackgroundWriter

QUEUE_BYTES = 512 << 20
"""Bytes of chunks that may wait to be written to remote tiers; more are not written, and counted."""
_REMEMBERED = 4096
_SECONDS = 1.0  # a look-up is asked for again and again while a request is planned

_log = logging.getLogger(__name__)

Found = tuple[GuardedTier, Head]


class Remotes(Generic[HeldChunk]):
    """Remote tiers, fastest first. ``file_of`` returns the file of a chunk as the store's memory holds it."""

    def __init__(self, tiers: Sequence[GuardedTier], file_of: Callable[[HeldChunk], memoryview]) -> None:
        self.tiers = tuple(tiers)
        self.counts: Counter[str] = Counter()
        """By ``TIER hits``, ``TIER misses``, ``uploaded``, ``not uploaded``."""
        self._file_of = file_of
        self._writer: BackgroundWriter[HeldChunk] = BackgroundWriter(self._upload, QUEUE_BYTES)
        self._pool = ThreadPoolExecutor(4 * len(self.tiers), thread_name_prefix="blendkv-remote")
        self._seen: OrderedDict[str, tuple[float, Found | None]] = OrderedDict()
        self._there: OrderedDict[str, None] = OrderedDict()  # keys that need no upload
        self._late: list[HeldChunk] = []  # a put that was left alone reads its chunk's memory until it ends
        self._lock = threading.Lock()

    def find(self, key: str) -> RemoteReader | None:
        """A reader of the chunk in the tier that first answers that it has it, or None.

        Raises
        ------
        DamagedChunkError
            If what is stored there cannot be used.
        """
        found = self._find(key)
        return None if found is None else RemoteReader(key, *found, lambda tier: self._another(key, tier))

    def offer(self, kv: HeldChunk) -> None:
        """Write a chunk to all tiers, in the background; not at all, and counted, while too much waits."""
        if kv.key in self._there:
            return
        if not self._writer.offer(kv):
            self._not_uploaded(kv.key, "too much waits to be written")

    def delete(self, key: str) -> bool:
        """Forget a chunk in every tier; return whether one had it. A tier that does not answer keeps it."""
        with self._lock:
            self._seen.pop(key, None)
            self._there.pop(key, None)
        there = False
        for tier in self.tiers:
            try:
                there |= tier.delete(key)
            except TierUnavailableError as error:
                _log.warning("chunk KV %s may still be in %s: %s", key[:12], tier.name, error)
        return there

    def stats(self) -> tuple[RemoteStat, ...]:
        """What each tier did."""
        return tuple(tier.stat() for tier in self.tiers)

    @property
    def pending_bytes(self) -> int:
        """Bytes of K and V that wait to be written, or are being written."""
        return self._writer.pending_bytes

    @property
    def pending_chunks(self) -> int:
        """How many chunks these are."""
        return self._writer.pending_chunks

    def drain(self) -> None:
        """Wait until all that was offered is written, or could not be."""
        self._writer.drain()

    def close(self) -> None:
        """Write what waits, as far as tiers answer, then close them."""
        self._writer.close()
        self._pool.shutdown(cancel_futures=True)
        for tier in self.tiers:
            tier.close()

    def _find(self, key: str) -> Found | None:
        with self._lock:
            seen = self._seen.get(key)
        if seen is not None and time.monotonic() < seen[0]:
            return seen[1]
        found = next(self._ask(key, self.tiers), None)
        with self._lock:
            self._seen[key] = time.monotonic() + _SECONDS, found
            self._seen.move_to_end(key)
            while len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        return found

    def _ask(self, key: str, tiers: Sequence[GuardedTier]) -> Iterator[Found]:
        """The tiers that have the chunk, in the order in which they answer."""
        asked = {self._pool.submit(tier.head, key): tier for tier in tiers}
        for future in as_completed(asked):
            tier = asked[future]
            try:
                head = future.result()
            except DamagedChunkError as error:
                _log.warning("chunk KV %s is damaged in %s (%s)", key[:12], tier.name, error.reason)
                head = None
            except StoreError:  # it does not answer, and has said so
                head = None
            self.counts[f"{tier.name} {'misses' if head is None else 'hits'}"] += 1
            if head is not None:
                self._remember(key)
                yield tier, head

    def _another(self, key: str, failed: GuardedTier) -> Found | None:
        """Another tier that has the chunk, behind ``failed`` in the order: so no tier is tried twice."""
        place = self.tiers.index(failed)
        with self._lock:
            self._seen.pop(key, None)
        return next(self._ask(key, self.tiers[place + 1 :]), None)

    def _upload(self, kv: HeldChunk) -> None:
        if self._late and not any(tier.stat().stuck for tier in self.tiers):
            self._late.clear()
        file = self._file_of(kv)
        header = parse_header(file, file.nbytes, kv.key)
        if not header.in_order:
            raise StoreError(f"chunk KV {kv.key[:12]} was written by a first release and cannot be cut into layers")
        ranges = [header.layer_range(index) for index in range(header.layers)]
        layers = [file[start:stop] for start, stop in ranges]
        written = [self._put(tier, kv, file[: ranges[0][0]], layers) for tier in self.tiers]
        if all(written):
            self._remember(kv.key)

    def _put(self, tier: GuardedTier, kv: HeldChunk, head: memoryview, layers: Sequence[memoryview]) -> bool:
        """Write a chunk to one tier; return whether it is there."""
        try:
            tier.put(kv.key, head, layers)
        except StoreError as error:
            if isinstance(error, TierUnavailableError):
                self._late.append(kv)
            self._not_uploaded(kv.key, str(error))
            return False
        self.counts["uploaded"] += 1
        return True

    def _not_uploaded(self, key: str, reason: str) -> None:
        if not self.counts["not uploaded"]:
            _log.warning("chunk KV %s is not in a remote tier, later ones are only counted: %s", key[:12], reason)
        self.counts["not uploaded"] += 1

    def _remember(self, key: str) -> None:
        with self._lock:
            self._there[key] = None
            while len(self._there) > _REMEMBERED:
                self._there.popitem(last=False)
