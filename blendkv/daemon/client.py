"""The store of a daemon, as an engine sees it: `blendkv.store.KVStore`'s calls over a connection that mends itself."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from blendkv.daemon import messages as m
from blendkv.daemon.borrowing import Borrower
from blendkv.daemon.connection import PATIENCE, Answer, DownError
from blendkv.daemon.index import RemoteIndex
from blendkv.daemon.link import Link
from blendkv.daemon.putting import Handover
from blendkv.daemon.uses import words
from blendkv.errors import StoreError
from blendkv.market.hints import Hint
from blendkv.market.words import check_hint
from blendkv.observe.tracing import detail
from blendkv.store.base import ChunkReader, IndexReader, TierStat
from blendkv.store.chunkfile import token_ids_digest
from blendkv.store.pricing import check_count
from blendkv.store.reports import ChunkInfo, GcReport, MarketReport, RepairReport, StoreStat, VerifyReport
from blendkv.store.writer import BackgroundWriter
from blendkv.types import ChunkKV, TokenIds, as_token_ids

if TYPE_CHECKING:
    from blendkv.daemon.pinning import Pinning

QUEUE_BYTES = 512 << 20
"""Bytes of K and V that may wait to be handed to the daemon."""
DEADLINE = 0.1
"""Seconds in which the daemon must show that it lives."""
_EMPTY = StoreStat((TierStat("memory", 0, 0, 0), TierStat("disk", 0, 0, None)), 0, {}, 0, 0, 0, 0, 0)

_log = logging.getLogger(__name__)


class DaemonStore:
    """Chunk KVs by key in the daemon of the store at ``root``; safe to use from several threads.

    While no daemon answers, look-ups find nothing and chunks that are put are dropped and counted, so that requests
    are prefilled in full and none waits; listing, pinning and their like raise. The connection mends itself.

    Parameters
    ----------
    root
        The store's folder.
    deadline
        Seconds in which the daemon must show that it lives; one that does not counts as gone.
    """

    def __init__(self, root: Path, deadline: float = DEADLINE) -> None:
        self.path = root.absolute()
        """The store's folder."""
        self._link = Link(self.path, "engine", deadline)
        self._index = RemoteIndex(self._link)
        self._handover = Handover(self._link)
        self._writer: BackgroundWriter[ChunkKV] = BackgroundWriter(self._handover.put, QUEUE_BYTES)
        self._counts: Counter[str] = Counter()
        self._borrower = Borrower(self.path, self._link, self._counts, self.discard)
        self._last = _EMPTY
        self._pinning: Pinning | None = None
        self._closed = False

    @property
    def repair(self) -> RepairReport:
        """What the daemon put right when it opened the store."""
        return self._link.connection().welcome.repair

    @property
    def index(self) -> IndexReader:
        """The index, to look for chunks by content; its calls raise `StoreError` while no daemon answers."""
        self._check_open()
        return self._index

    @property
    def up(self) -> bool:
        """Whether the daemon answers, as far as is known."""
        return self._link.up

    def pin_memory(self, pinning: Pinning) -> None:
        """Keep the daemon's memory page-locked for CUDA, also that of a daemon found later; a second call is ignored.

        For engines, by `blendkv.daemon.pinning.pin_for`.
        """
        if self._pinning is None:
            self._pinning = pinning
            self._link.watch(lambda connection: pinning.take(connection.window))

    @property
    def pin_failures(self) -> int:
        """How often the daemon's memory could not be page-locked, or let go."""
        return 0 if self._pinning is None else self._pinning.failures

    @property
    def missed(self) -> int:
        """Calls that found no daemon."""
        return self._counts["down"]

    @property
    def reconnects(self) -> int:
        """How often a daemon that was gone was found again."""
        return self._link.reconnects

    def contains(self, key: str, token_ids: TokenIds) -> bool:
        """Whether the chunk is stored; counts neither as a use nor as a hit."""
        self._check_open()
        pending = self._writer.pending(key)
        if pending is not None:
            return np.array_equal(pending.token_ids, token_ids)
        return self.lookup([key])[0] == token_ids_digest(as_token_ids(token_ids))

    def lookup(self, keys: Sequence[str]) -> list[str | None]:
        """The digest (`token_ids_digest`) of the token ids stored under each key, None where nothing is.

        One message for many keys; counts neither as a use nor as a hit.
        """
        self._check_open()
        found: list[str | None] = [digest.hex() or None for digest in self._digests(keys).digests]
        for place, key in enumerate(keys):
            pending = self._writer.pending(key)
            if pending is not None:
                found[place] = token_ids_digest(pending.token_ids)
        return found

    def in_memory(self, key: str) -> bool:
        """Whether the chunk can be read without the disk."""
        self._check_open()
        return self._writer.pending(key) is not None or self._digests([key]).in_memory[0]

    def token_ids(self, key: str) -> TokenIds | None:
        """Token ids stored under ``key``, or None."""
        self._check_open()
        pending = self._writer.pending(key)
        if pending is not None:
            return pending.token_ids
        try:
            data = self._ask(m.TokenIdsOf(bytes.fromhex(key)), m.Blob, PATIENCE).data
        except DownError:
            return None
        return as_token_ids(np.frombuffer(data, dtype="<i4")) if data else None

    def get(self, key: str, token_ids: TokenIds) -> ChunkReader | None:
        """Return a reader for the chunk, or None. It stays in the daemon's memory while reader or tensors live."""
        return self.get_all([(key, token_ids)])[0]

    def get_all(self, wanted: Sequence[tuple[str, TokenIds]]) -> list[ChunkReader | None]:
        """`get` for many chunks, with one message: the daemon opens their files, and loads them, side by side."""
        self._check_open()
        found: list[ChunkReader | None] = [self._writer.pending(key) for key, _ in wanted]
        asked = [place for place, pending in enumerate(found) if pending is None]
        for place, reader in zip(asked, self._borrower.borrow([wanted[place][0] for place in asked]), strict=True):
            found[place] = reader
        for place, (_, token_ids) in enumerate(wanted):
            reader = found[place]
            if reader is not None and not np.array_equal(reader.token_ids, token_ids):
                self._counts["collision"] += 1
                found[place] = None
        return found

    def put(self, kv: ChunkKV) -> None:
        """Store ``kv`` in the daemon's memory and on disk; a chunk that is there already is left as it is.

        Raises
        ------
        InputError
            If the tensors do not fit the token ids, the recipe or each other.
        StoreFullError
            If there is no room on disk, even after eviction.
        StoreError
            If another chunk is stored under the same key, the disk cannot be written, or no daemon answers.
        """
        self._check_open()
        self._handover.put(_checked(kv))

    def put_async(self, kv: ChunkKV) -> None:
        """Like `put`, in the background; waits while too many bytes are queued.

        What goes wrong there is counted, logged once, and raised by `flush`.

        Raises
        ------
        InputError
            As `put`.
        """
        self._check_open()
        self._writer.submit(_checked(kv))

    def flush(self) -> None:
        """Wait until all chunks put in the background are on disk.

        Raises
        ------
        StoreFullError, StoreError
            If some are not, since the last call.
        """
        self._check_open()
        failures = self._writer.drain()
        if failures:
            message = f"{len(failures)} chunk KVs could not be stored in the background; the first: {failures[0]}"
            kind = type(failures[0]) if len({type(failure) for failure in failures}) == 1 else StoreError
            raise kind(message) from failures[0]

    def prefetch(self, keys: Iterable[str], priority: int = 0) -> int:
        """Let the daemon bring chunks to memory, a higher ``priority`` first; return how many are there or come."""
        self._check_open()
        try:
            return self._ask(m.Prefetch(_bytes(keys), priority, *words()), m.Number).value
        except DownError:
            return 0

    def cancel(self, keys: Iterable[str]) -> int:
        """Forget prefetches that have not begun; return how many."""
        self._check_open()
        try:
            return self._ask(m.Cancel(_bytes(keys)), m.Number).value
        except DownError:
            return 0

    def hint(self, session: str, what: Hint, ttl: float = 0.0) -> bool:
        """Tell the daemon what a session says of itself; return whether its policy listens, False if none answers.

        Raises
        ------
        InputError
            As `blendkv.store.KVStore.hint`.
        """
        self._check_open()
        check_hint(session, what, ttl)
        try:
            return bool(self._ask(m.Hint(session, what, float(ttl)), m.Number, PATIENCE).value)
        except StoreError as error:
            _log.debug("hint %s of a session was not heard: %s", what, error)
            return False

    def earns(self, key: str, tokens: int, nbytes: int, tenant: str = "") -> bool:
        """See `blendkv.store.pressure.Selective`; True while no daemon answers: its put is dropped, and counted."""
        self._check_open()
        try:
            request = m.Earns(bytes.fromhex(key), tokens, nbytes, tenant, *words())
            return bool(self._ask(request, m.Number, PATIENCE).value)
        except DownError:
            return True

    def discard(self, key: str, reason: str) -> None:
        """Drop a damaged chunk everywhere; counted by what stands before the first colon of ``reason``."""
        self._check_open()
        try:
            self._ask(m.Discard(bytes.fromhex(key), reason), m.Done)
        except DownError:
            _log.warning("chunk KV %s is damaged (%s); the daemon could not be told", key[:12], reason)

    def remove(self, key: str) -> bool:
        """Drop a chunk everywhere, pinned or not; return whether it was there."""
        self._check_open()
        there = self._writer.cancel(key)
        return bool(self._ask(m.Remove(bytes.fromhex(key)), m.Number).value) or there

    def pin(self, keys: Iterable[str]) -> None:
        """Keep chunks from eviction until they are unpinned or removed; `InputError` if one is not stored."""
        self._set_pinned(keys, True)

    def unpin(self, keys: Iterable[str]) -> None:
        """Let chunks be evicted again; `InputError` if one is not stored."""
        self._set_pinned(keys, False)

    def ls(self) -> list[ChunkInfo]:
        """Every chunk, least recently used first."""
        self._check_open()
        return self._ask(m.List(), m.Listing).chunks

    def stat(self) -> StoreStat:
        """What the daemon's store holds and did since it was started; the last that was heard while none answers."""
        self._check_open()
        with suppress(DownError):
            self.daemon_stats()
        return replace(
            self._last,
            background_errors=self._last.background_errors + self._writer.failed,
            pending_bytes=self._last.pending_bytes + self._writer.pending_bytes,
        )

    def daemon_stats(self) -> m.Stats:
        """The daemon's own counts beside the store's."""
        self._check_open()
        # Not by `_ask`: who looks on is no request that missed something.
        stats = self._link.connection().ask(m.Stat(), m.Stats)
        self._last = stats.store
        return stats

    def market(self, count: int = 20) -> MarketReport:
        """The ``count`` chunks that would leave the daemon's memory first, and what more memory would have saved.

        Raises
        ------
        InputError
            If the daemon's policy keeps no prices, or ``count`` is not 1 to 1,000.
        StoreError
            If no daemon answers.
        """
        self._check_open()
        check_count(count)
        return self._link.connection().ask(m.Market(count), m.Marketed).report

    def verify(self) -> VerifyReport:
        """Let the daemon read every file in full, and drop and list what is damaged."""
        self._check_open()
        return self._ask(m.Verify(), m.Verified).report

    def gc(self) -> GcReport:
        """Let the daemon evict down to its limits and sweep up what crashes left behind."""
        self._check_open()
        return self._ask(m.Collect(), m.Collected).report

    def drop_page_cache(self) -> None:
        """Make the next read of every file a cold one. For benchmarks."""
        self._check_open()
        self._ask(m.DropPageCache(), m.Done)

    def close(self) -> None:
        """Hand over what waits, then end the connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        failures = self._writer.close()
        if failures:
            _log.error("%d chunk KVs could not be stored in the background: %s", len(failures), failures[0])
        self._link.close()
        if self._pinning is not None:
            self._pinning.close()

    def __enter__(self) -> DaemonStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed; open it again")

    def _ask(self, request: m.Request, expected: type[Answer], limit: float | None = None) -> Answer:
        try:
            with detail("daemon", request=type(request).__name__):
                return self._link.connection().ask(request, expected, limit=limit)
        except DownError:
            self._counts["down"] += 1
            raise

    def _digests(self, keys: Sequence[str]) -> m.Digests:
        """What the daemon says of many keys; while none answers, that it has none of them."""
        found = m.Digests([], [])
        try:
            for first in range(0, len(keys), m.MOST_KEYS):
                some = self._ask(m.Lookup(_bytes(keys[first : first + m.MOST_KEYS])), m.Digests, PATIENCE)
                found = m.Digests(found.digests + some.digests, found.in_memory + some.in_memory)
        except DownError:
            return m.Digests([b""] * len(keys), [False] * len(keys))
        return found

    def _set_pinned(self, keys: Iterable[str], pinned: bool) -> None:
        self._check_open()
        wanted = list(keys)
        for key in wanted:
            self._writer.wait(key)
        self._ask(m.Pin(_bytes(wanted), pinned), m.Done)


def _bytes(keys: Iterable[str]) -> list[bytes]:
    return [bytes.fromhex(key) for key in keys]


def _checked(kv: ChunkKV) -> ChunkKV:
    from blendkv.store.normalise import normalised

    return normalised(kv)
