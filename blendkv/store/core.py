"""The store's tiers behind one door, whatever the form in which chunks are held in memory."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from blendkv.errors import DamagedChunkError, InputError, StoreError, StoreFullError
from blendkv.store.base import Chunk, HeldChunk, IndexReader, Tier, TierStat
from blendkv.store.disk import DiskTier, same_chunk
from blendkv.store.memory import MemoryTier
from blendkv.store.pressure import Pressed
from blendkv.store.quotas import Quotas
from blendkv.store.remote_reader import RemoteReader
from blendkv.store.remotes import Remotes
from blendkv.store.repair import sweep
from blendkv.store.reports import ChunkInfo, GcReport, RepairReport, StoreStat, TenantUse, VerifyReport
from blendkv.store.timing import Latency, Timings
from blendkv.store.writer import BackgroundWriter
from blendkv.types import TokenIds

QUEUE_BYTES = 512 << 20
"""Bytes of chunks that may wait for the background writer."""

_log = logging.getLogger(__name__)


class TieredStore(Pressed[HeldChunk]):
    """Chunk KVs by key, in memory first, then on disk, then in remote tiers.

    `blendkv.store.KVStore` holds tensors, for an engine in this process; the daemon's store holds files in shared
    memory. Safe to use from several threads; several processes may have the same directory open.

    Of another process's removals and pins the disk knows at once; the memory of this process goes on serving what it
    holds, and learns of pins when the store is opened.
    """

    def __init__(
        self,
        memory: MemoryTier[HeldChunk],
        disk: DiskTier[HeldChunk] | None,
        repair: RepairReport,
        remotes: Remotes[HeldChunk] | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self.repair = repair
        """What opening put right."""
        self._memory = memory
        self._disk = disk
        self._remotes = remotes
        self._quotas = quotas or Quotas()
        self._writer: BackgroundWriter[HeldChunk] = BackgroundWriter(self._put_disk, QUEUE_BYTES)
        self._counts: Counter[str] = Counter()
        self._timings = Timings()
        self._discarded: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._moving = threading.Lock()  # a promotion must not bring back what is being dropped
        self._closed = False
        if disk is not None:
            memory.pin(disk.index.pinned())
        self._appraise_disk()

    @abstractmethod
    def _checked(self, kv: HeldChunk) -> HeldChunk:
        """Return ``kv`` in the form in which it is held, or raise `InputError`."""

    @property
    def path(self) -> Path | None:
        """Folder of the disk tier, absolute; None if the store is in memory only."""
        return None if self._disk is None else self._disk.root.absolute()

    @property
    def index(self) -> IndexReader | None:
        """The index of the disk, to look for chunks by content; None if the store is in memory only."""
        self._check_open()
        return None if self._disk is None else self._disk.index

    @property
    def asks_remotes(self) -> bool:
        """Whether a look-up may take as long as a remote tier does."""
        return self._remotes is not None

    def contains(self, key: str, token_ids: TokenIds) -> bool:
        """Whether the chunk is here, or in a remote tier; counts neither as a use nor as a hit."""
        held = self.token_ids(key)
        return held is not None and np.array_equal(held, token_ids)

    def in_memory(self, key: str) -> bool:
        """Whether the chunk can be read without the disk."""
        self._check_open()
        return self._memory.contains(key) or self._writer.pending(key) is not None

    def token_ids(self, key: str) -> TokenIds | None:
        """Token ids stored under ``key``, or None. Reads the index, and asks remote tiers for what it does not have."""
        return self.token_ids_of([key])[0]

    def token_ids_of(self, keys: Sequence[str]) -> list[TokenIds | None]:
        """`token_ids` of many keys; the index is asked once for all of them."""
        self._check_open()
        found = {key: ids for key in keys if (ids := self._held_token_ids(key)) is not None}
        if self._disk is not None:
            rest = [key for key in keys if key not in found]
            found |= {entry.key: entry.token_ids for entry in self._disk.index.entries(rest)}
        for key in keys:
            if key not in found and (reader := self._from_remote(key)) is not None:
                found[key] = reader.token_ids
        return [found.get(key) for key in keys]

    def _held_token_ids(self, key: str) -> TokenIds | None:
        held = self._memory.token_ids(key)
        if held is None and (waiting := self._writer.pending(key)) is not None:
            held = waiting.token_ids
        return held

    def put(self, kv: HeldChunk) -> None:
        """Store ``kv`` in memory and on disk; a chunk that is there already is left as it is.

        On disk only, if the policy finds that what would leave memory for it is worth more.

        Raises
        ------
        InputError
            If ``kv`` is not a whole chunk.
        StoreFullError
            If there is no room on disk, even after eviction (there is a copy in memory then, if it fits), or none in
            memory for a store without a disk.
        StoreError
            If another chunk is stored under the same key, or the disk cannot be written.
        """
        self._check_open()
        kv = self._admit(kv)
        if self._disk is not None:
            self._put_disk(kv)

    def put_async(self, kv: HeldChunk) -> None:
        """Like :meth:`put`, with the disk written by a background thread; waits while too many bytes are queued.

        What goes wrong there is counted, logged once, and raised by :meth:`flush`.

        Raises
        ------
        InputError, StoreError
            As :meth:`put`, for what shows without the disk.
        """
        self._check_open()
        kv = self._admit(kv)
        if self._disk is not None:
            self._writer.submit(kv)

    def flush(self) -> None:
        """Wait until all chunks put in the background are on disk.

        Raises
        ------
        StoreFullError
            If some are not, since the last call, for want of room.
        StoreError
            If some are not for any other reason.
        """
        self._check_open()
        failures = self._writer.drain()
        if self._disk is not None:
            self._disk.index.flush_touches()
        if failures:
            full = all(isinstance(failure, StoreFullError) for failure in failures)
            message = f"{len(failures)} chunk KVs could not be stored in the background; the first: {failures[0]}"
            raise (StoreFullError if full else StoreError)(message) from failures[0]

    def discard(self, key: str, reason: str) -> None:
        """Drop a damaged chunk everywhere; counted by what stands before the first colon of ``reason``."""
        self._check_open()
        if self._drop(key):
            kind = reason.split(":", 1)[0]
            with self._lock:
                self._discarded[kind] += 1
            _log.warning("chunk KV %s is damaged (%s); dropped", key[:12], reason)

    def remove(self, key: str) -> bool:
        """Drop a chunk everywhere, pinned or not; return whether it was there."""
        self._check_open()
        there = self._drop(key)
        return (self._remotes is not None and self._remotes.delete(key)) or there

    def pin(self, keys: Iterable[str]) -> None:
        """Keep chunks from eviction until they are unpinned or removed; remembered on disk.

        Raises
        ------
        InputError
            If a key is not in the store; none is pinned then.
        """
        self._set_pinned(keys, True)

    def unpin(self, keys: Iterable[str]) -> None:
        """Let chunks be evicted again.

        Raises
        ------
        InputError
            If a key is not in the store; none is unpinned then.
        """
        self._set_pinned(keys, False)

    def ls(self) -> list[ChunkInfo]:
        """Every chunk, least recently used first (those in memory only come last, in no order)."""
        self._check_open()
        rows = []
        if self._disk is not None:
            self._disk.index.flush_touches()
            rows = self._disk.index.rows()
        infos = [
            ChunkInfo(
                *(row.key, row.fingerprint, row.recipe, len(row.token_ids), row.nbytes, row.file_bytes, row.created),
                *(row.last_used, row.pinned, ("memory", "disk") if self._memory.contains(row.key) else ("disk",)),
            )
            for row in rows
        ]
        on_disk = {row.key for row in rows}
        for kv in self._memory.chunks():
            if kv.key not in on_disk:
                pinned = self._memory.pinned(kv.key)
                infos.append(
                    ChunkInfo(
                        *(kv.key, kv.fingerprint, kv.recipe, len(kv.token_ids), kv.nbytes, None, None, None, pinned),
                        ("memory",),
                    )
                )
        return infos

    def stat(self) -> StoreStat:
        """What the store holds, and what happened since it was opened."""
        self._check_open()
        with self._lock:
            counts, discarded = Counter(self._counts), dict(self._discarded)
        timings = self._timings.read()
        tiers: list[Tier] = [self._memory] if self._disk is None else [self._memory, self._disk]
        return StoreStat(
            tiers=tuple(_with_counts(tier.stat(), counts, timings) for tier in tiers),
            collision=counts["collision"],
            discarded=discarded,
            promoted=counts["promoted"],
            not_in_memory=counts["not in memory"],
            background_errors=self._writer.failed,
            pending_bytes=self._writer.pending_bytes,
            pinned=len(self._pinned_keys()),
            remotes=() if self._remotes is None else self._remotes.stats(),
            uploaded=0 if self._remotes is None else self._remotes.counts["uploaded"],
            not_uploaded=0 if self._remotes is None else self._remotes.counts["not uploaded"],
            upload_pending_bytes=0 if self._remotes is None else self._remotes.pending_bytes,
            failed_loads=counts["failed loads"],
            pending_chunks=self._writer.pending_chunks,
            upload_pending_chunks=0 if self._remotes is None else self._remotes.pending_chunks,
            tenants=self._tenants(),
            tenant_quota=self._quotas.others,
        )

    def _tenants(self) -> tuple[TenantUse, ...]:
        disk = {} if self._disk is None else {tag: rest for tag, *rest in self._disk.index.tenants()}
        memory = self._memory.tenants()
        quotas, found = self._quotas, []
        for tag in sorted({*disk, *memory, *quotas.limits}):
            chunks, size = disk.get(tag, (0, 0))
            name = quotas.names.get(tag)
            found.append(TenantUse(tag, name, chunks, memory.get(tag, 0), size, quotas.of(tag)))
        return tuple(found)

    def verify(self) -> VerifyReport:
        """Read every file in full; drop and list what is damaged."""
        self._check_open()
        checked = size = 0
        damaged: list[tuple[str, str]] = []
        if self._disk is None:
            return VerifyReport(0, 0, ())
        for row in self._disk.index.rows():
            try:
                reader = self._disk.open(row.key)
                if reader is None:  # evicted or removed meanwhile
                    continue
                with closing(reader):
                    reader.verify()
                checked, size = checked + 1, size + row.nbytes
            except DamagedChunkError as error:
                self._damaged(error)
                damaged.append((row.key, error.reason))
        return VerifyReport(checked, size, tuple(damaged))

    def gc(self) -> GcReport:
        """Evict down to the limits and sweep up what crashes left behind."""
        self._check_open()
        if self._disk is None:
            return GcReport(0, 0, RepairReport())
        repair = sweep(self._disk)
        return GcReport(*self._disk.shrink(), repair)

    def drop_page_cache(self) -> None:
        """Make the next read of every file a cold one. For benchmarks.

        Raises
        ------
        StoreError
            If the system has no such call.
        """
        self._check_open()
        if self._disk is not None:
            self._disk.drop_page_cache(row.key for row in self._disk.index.rows())

    def close(self) -> None:
        """Write what waits, then close. Failures of the background that nobody flushed are logged. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        failures = self._writer.close()
        if self._remotes is not None:
            self._remotes.close()
        if failures:
            _log.error("%d chunk KVs could not be stored in the background: %s", len(failures), failures[0])
        if self._disk is not None:
            self._disk.index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed; open it again")

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _answer(self, tier: str, found: Chunk | None, token_ids: TokenIds) -> bool:
        """Count a look-up in a tier; return whether it is a match."""
        match = found is not None and np.array_equal(found.token_ids, token_ids)
        if found is not None and not match:
            self._count("collision")
        self._count(f"{tier} {'hits' if match else 'misses'}")
        return match

    def _admit(self, kv: HeldChunk) -> HeldChunk:
        """Check ``kv`` and hold it in memory; return it as it is held."""
        kv = self._checked(kv)
        row = None if self._disk is None else self._disk.index.row(kv.key)
        for there in (self._memory.get(kv.key), self._writer.pending(kv.key), row):
            if there is not None and not same_chunk(there, kv):
                self._count("collision")
                raise StoreError(f"another chunk is stored under the key {kv.key[:12]}; remove it first")
        if not self._let_in(kv):
            return kv
        try:
            with self._timings.timed("memory put"):
                return self._hold(kv)
        except StoreFullError:
            self._count("not in memory")
            if self._disk is None:
                raise
        return kv

    def _hold(self, kv: HeldChunk) -> HeldChunk:
        return self._memory.place(kv)

    def _size(self, kv: HeldChunk) -> int:
        return kv.nbytes

    def _put_disk(self, kv: HeldChunk) -> None:
        assert self._disk is not None
        try:
            with self._timings.timed("disk put"):
                self._disk.put(kv)
        except StoreError:
            self._rescue(kv)
            raise
        if self._remotes is not None:
            self._remotes.offer(kv)
        if self._memory.pinned(kv.key):  # pinned while it was in memory only
            with self._disk.index.transaction():
                self._disk.index.set_pinned([kv.key], True)

    def _damaged(self, error: DamagedChunkError) -> None:
        self._count("disk damaged")
        if self._closed:
            return
        try:
            self.discard(error.key, error.reason)
        except StoreError as failure:  # the reader still has to tell of the damage itself
            _log.warning(
                "chunk KV %s is damaged (%s) and could not be dropped: %s", error.key[:12], error.reason, failure
            )

    def _drop(self, key: str) -> bool:
        there = self._writer.cancel(key)
        with self._moving:
            if self._disk is not None:
                there |= self._disk.delete(key)
            return self._memory.delete(key) or there

    def _from_remote(self, key: str) -> RemoteReader | None:
        """A reader of the chunk in the first remote tier that has it; looked up in all of them at once."""
        if self._remotes is None:
            return None
        try:
            return self._remotes.find(key)
        except DamagedChunkError as error:
            self._count("remote damaged")
            _log.warning("chunk KV %s is damaged in a remote tier (%s); it is computed again", key[:12], error.reason)
            return None

    def _keep_remote(self, kv: HeldChunk) -> None:
        """A chunk that has come whole from a remote tier goes to disk, in the background."""
        if not self._closed and self._disk is not None:
            self._count("from remote")
            self._writer.submit(kv)

    def _set_pinned(self, keys: Iterable[str], pinned: bool) -> None:
        self._check_open()
        keys = list(keys)
        for key in keys:
            self._writer.wait(key)
            if not self._memory.contains(key) and (self._disk is None or not self._disk.contains(key)):
                raise InputError(f"no chunk KV {key[:12]} in the store; list the store for its keys")
        if self._disk is not None:
            with self._disk.index.transaction():
                self._disk.index.set_pinned(keys, pinned)
        (self._memory.pin if pinned else self._memory.unpin)(keys)

    def _pinned_keys(self) -> set[str]:
        keys = {kv.key for kv in self._memory.chunks() if self._memory.pinned(kv.key)}
        return keys if self._disk is None else keys.union(self._disk.index.pinned())


def _with_counts(stat: TierStat, counts: Counter[str], timings: Mapping[str, Latency]) -> TierStat:
    hits, misses, damaged = (counts[f"{stat.name} {what}"] for what in ("hits", "misses", "damaged"))
    latencies = {what.split()[1]: found for what, found in timings.items() if what.split()[0] == stat.name}
    return replace(stat, hits=hits, misses=misses, damaged=damaged, latencies=latencies)
