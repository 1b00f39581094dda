"""The memory tier: chunk KVs in this process, up to a byte limit."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from blendkv.errors import StoreFullError
from blendkv.store.base import EvictionPolicy, TierStat
from blendkv.types import ChunkKV, TokenIds


class MemoryTier:
    """Chunk KVs in memory. ``limit`` bounds the bytes of K and V; pinned chunks are never evicted."""

    name = "memory"

    def __init__(self, limit: int, policy: EvictionPolicy) -> None:
        self.limit = limit
        self._policy = policy
        self._chunks: dict[str, ChunkKV] = {}
        self._bytes = 0
        self._pinned: set[str] = set()
        self._evictions: Counter[str] = Counter()
        self._lock = threading.Lock()

    def token_ids(self, key: str) -> TokenIds | None:
        """Token ids stored under ``key``, or None."""
        kv = self._chunks.get(key)
        return None if kv is None else kv.token_ids

    def contains(self, key: str) -> bool:
        """Whether ``key`` is in memory."""
        return key in self._chunks

    def get(self, key: str) -> ChunkKV | None:
        """Return the chunk under ``key``, or None."""
        with self._lock:
            kv = self._chunks.get(key)
            if kv is not None:
                self._policy.touched(key)
            return kv

    def fits(self, nbytes: int) -> bool:
        """Whether ``nbytes`` bytes can be held once everything that is not pinned has left."""
        with self._lock:
            return nbytes <= self.limit - self._pinned_bytes()

    def put(self, kv: ChunkKV) -> None:
        """Hold ``kv``, evicting others by policy; a chunk that is there already is left as it is.

        Raises
        ------
        StoreFullError
            If it is larger than what is not pinned; nothing is evicted then.
        """
        with self._lock:
            if kv.key in self._chunks:
                self._policy.touched(kv.key)
                return
            pinned = self._pinned_bytes()
            if kv.nbytes > self.limit - pinned:
                raise StoreFullError(
                    f"a chunk KV of {kv.nbytes} bytes does not fit in memory: the limit is {self.limit} bytes, "
                    f"{pinned} of them pinned; raise the limit or unpin some"
                )
            excess = self._bytes + kv.nbytes - self.limit
            if excess > 0:
                for key in self._policy.victims(excess, self._pinned):
                    self._drop(key)
                    self._evictions["limit"] += 1
            self._chunks[kv.key] = kv
            self._bytes += kv.nbytes
            self._policy.added(kv.key, kv.nbytes)

    def delete(self, key: str) -> bool:
        """Forget ``key`` and its pin; return whether it was there."""
        with self._lock:
            self._pinned.discard(key)
            return self._drop(key)

    def pin(self, keys: Iterable[str]) -> None:
        """Keep ``keys`` from eviction, those that come later included."""
        with self._lock:
            self._pinned.update(keys)

    def unpin(self, keys: Iterable[str]) -> None:
        """Let ``keys`` be evicted again."""
        with self._lock:
            self._pinned.difference_update(keys)

    def pinned(self, key: str) -> bool:
        """Whether ``key`` is pinned."""
        return key in self._pinned

    def chunks(self) -> list[ChunkKV]:
        """All chunks, in no particular order."""
        with self._lock:
            return list(self._chunks.values())

    def stat(self) -> TierStat:
        """Chunks, bytes, limit and evictions."""
        with self._lock:
            return TierStat(self.name, len(self._chunks), self._bytes, self.limit, evictions=dict(self._evictions))

    def _pinned_bytes(self) -> int:
        return sum(self._chunks[key].nbytes for key in self._pinned if key in self._chunks)

    def _drop(self, key: str) -> bool:
        kv = self._chunks.pop(key, None)
        if kv is None:
            return False
        self._bytes -= kv.nbytes
        self._policy.removed(key)
        return True
