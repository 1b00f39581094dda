"""What an engine asks of a store, whether it lies in this process or in a daemon."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from blendkv.market.hints import Hint
from blendkv.store.base import ChunkReader, IndexReader
from blendkv.store.reports import ChunkInfo, GcReport, MarketReport, RepairReport, StoreStat, VerifyReport
from blendkv.types import ChunkKV, TokenIds


class Store(Protocol):
    """Chunk KVs by key; `blendkv.store.KVStore` is one, `blendkv.daemon.client.DaemonStore` the other.

    Safe to use from several threads. A key matches only together with its token ids. Calls raise `StoreError` if the
    store is closed or cannot do what is asked.
    """

    @property
    def path(self) -> Path | None:
        """The store's folder, absolute; None if it is in memory only."""

    @property
    def repair(self) -> RepairReport:
        """What opening it put right."""

    @property
    def index(self) -> IndexReader | None:
        """The index, to look for chunks by content; None if the store is in memory only."""

    def contains(self, key: str, token_ids: TokenIds) -> bool:
        """Whether the chunk is here; counts neither as a use nor as a hit."""

    def in_memory(self, key: str) -> bool:
        """Whether the chunk can be read without a slower tier."""

    def token_ids(self, key: str) -> TokenIds | None:
        """Token ids stored under ``key``, or None."""

    def get(self, key: str, token_ids: TokenIds) -> ChunkReader | None:
        """Return a reader for the chunk, or None."""

    def get_all(self, wanted: Sequence[tuple[str, TokenIds]]) -> list[ChunkReader | None]:
        """`get` for many chunks, each a key and its token ids: all that a prompt needs, at once."""

    def put(self, kv: ChunkKV) -> None:
        """Store ``kv``; a chunk that is there already is left as it is."""

    def put_async(self, kv: ChunkKV) -> None:
        """Like `put`, in the background; what goes wrong there is raised by `flush`."""

    def flush(self) -> None:
        """Wait until all chunks put in the background are on disk."""

    def discard(self, key: str, reason: str) -> None:
        """Drop a damaged chunk everywhere; counted by what stands before the first colon of ``reason``."""

    def remove(self, key: str) -> bool:
        """Drop a chunk everywhere, pinned or not; return whether it was there."""

    def pin(self, keys: Iterable[str]) -> None:
        """Keep chunks from eviction until they are unpinned or removed."""

    def unpin(self, keys: Iterable[str]) -> None:
        """Let chunks be evicted again."""

    def hint(self, session: str, what: Hint, ttl: float = 0.0) -> bool:
        """Tell the tiers what a session says of itself; return whether a policy listens.

        It is about to wait for a tool for ``ttl`` seconds at most (``tool_started``), has its result
        (``tool_finished``), or is over (``session_ended``). `InputError` for what `blendkv.market.words.check_hint`
        refuses.
        """

    def market(self, count: int = 20) -> MarketReport:
        """The ``count`` chunks that would leave memory first, and what more memory would have saved.

        `InputError` if the memory's policy keeps no prices.
        """

    def ls(self) -> list[ChunkInfo]:
        """Every chunk, least recently used first."""

    def stat(self) -> StoreStat:
        """What the store holds, and what happened since it was opened."""

    def verify(self) -> VerifyReport:
        """Read every file in full; drop and list what is damaged."""

    def gc(self) -> GcReport:
        """Evict down to the limits and sweep up what crashes left behind."""

    def drop_page_cache(self) -> None:
        """Make the next read of every file a cold one. For benchmarks."""

    def close(self) -> None:
        """Write what waits, then close. Idempotent."""
