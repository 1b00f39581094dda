"""The memory tier: chunk KVs in this process, up to a byte limit."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic

from blendkv.errors import StoreFullError
from blendkv.store.base import EvictionPolicy, HeldChunk, TierStat
from blendkv.types import TokenIds


class MemoryTier(Generic[HeldChunk]):
    """Chunk KVs in memory. ``limit`` bounds their bytes; chunks that are pinned or in use are never evicted.

    ``weigh`` returns the bytes that a chunk holds; those of its K and V by default.
    """

    name = "memory"

    def __init__(
        self, limit: int, policy: EvictionPolicy, weigh: Callable[[HeldChunk], int] = lambda kv: kv.nbytes
    ) -> None:
        self._weigh = weigh
        self.limit = limit
        self._policy = policy
        self._chunks: dict[str, HeldChunk] = {}
        self._bytes = 0
        self._pinned: set[str] = set()
        self._used: Counter[str] = Counter()  # by how many users each chunk in use
        self._evictions: Counter[str] = Counter()
        self._lock = threading.Lock()

    def token_ids(self, key: str) -> TokenIds | None:
        """Token ids stored under ``key``, or None."""
        kv = self._chunks.get(key)
        return None if kv is None else kv.token_ids

    def contains(self, key: str) -> bool:
        """Whether ``key`` is in memory."""
        return key in self._chunks

    def get(self, key: str) -> HeldChunk | None:
        """Return the chunk under ``key``, or None."""
        with self._lock:
            kv = self._chunks.get(key)
            if kv is not None:
                self._policy.touched(key)
            return kv

    def fits(self, nbytes: int) -> bool:
        """Whether ``nbytes`` bytes can be held once everything that is not pinned has left."""
        with self._lock:
            return nbytes <= self.limit - self._kept_bytes()

    def put(self, kv: HeldChunk) -> None:
        """Hold ``kv``, evicting others by policy; a chunk that is there already is left as it is.

        Raises
        ------
        StoreFullError
            If it is larger than what is not pinned or in use; nothing is evicted then.
        """
        self.place(kv)

    def place(self, kv: HeldChunk) -> HeldChunk:
        """`put`; return what is held under the key, ``kv`` or the one that was there already."""
        with self._lock:
            return self._add(kv)

    def hold(self, kv: HeldChunk) -> HeldChunk:
        """`put` and `use` in one: return what is held under the key, ``kv`` or the one that was there already.

        Raises
        ------
        StoreFullError
            As `put`.
        """
        with self._lock:
            held = self._add(kv)
            self._used[kv.key] += 1
            return held

    def evict(self, nbytes: int) -> bool:
        """Evict chunks of ``nbytes`` bytes together, or what there is; return whether any went."""
        with self._lock:
            victims = self._policy.victims(nbytes, self._pinned | self._used.keys())
            self._evict(victims)
            return bool(victims)

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

    def use(self, key: str) -> HeldChunk | None:
        """Return the chunk under ``key`` and keep it from eviction until `release`; None if it is not there."""
        with self._lock:
            kv = self._chunks.get(key)
            if kv is not None:
                self._used[key] += 1
                self._policy.touched(key)
            return kv

    def in_use(self, key: str) -> bool:
        """Whether anybody uses ``key``."""
        return key in self._used

    def release(self, key: str) -> None:
        """One user of ``key`` less."""
        with self._lock:
            self._used[key] -= 1
            if self._used[key] <= 0:
                del self._used[key]

    def pinned(self, key: str) -> bool:
        """Whether ``key`` is pinned."""
        return key in self._pinned

    def chunks(self) -> list[HeldChunk]:
        """All chunks, in no particular order."""
        with self._lock:
            return list(self._chunks.values())

    def stat(self) -> TierStat:
        """Chunks, bytes, limit and evictions."""
        with self._lock:
            return TierStat(self.name, len(self._chunks), self._bytes, self.limit, evictions=dict(self._evictions))

    def _add(self, kv: HeldChunk) -> HeldChunk:
        held = self._chunks.get(kv.key)
        if held is not None:
            self._policy.touched(kv.key)
            return held
        size, kept = self._weigh(kv), self._kept_bytes()
        if size > self.limit - kept:
            raise StoreFullError(
                f"a chunk KV of {size} bytes does not fit in memory: the limit is {self.limit} bytes, "
                f"{kept} of them pinned or in use; raise the limit or unpin some"
            )
        excess = self._bytes + size - self.limit
        if excess > 0:
            self._evict(self._policy.victims(excess, self._pinned | self._used.keys()))
        self._chunks[kv.key] = kv
        self._bytes += size
        self._policy.added(kv.key, size)
        return kv

    def _evict(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._drop(key)
            self._evictions["limit"] += 1

    def _kept_bytes(self) -> int:
        return sum(self._weigh(self._chunks[key]) for key in self._pinned | self._used.keys() if key in self._chunks)

    def _drop(self, key: str) -> bool:
        kv = self._chunks.pop(key, None)
        if kv is None:
            return False
        self._bytes -= self._weigh(kv)
        self._policy.removed(key)
        return True
