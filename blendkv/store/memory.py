"""The memory tier: chunk KVs in this process, up to a byte limit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Generic

from blendkv.errors import StoreFullError
from blendkv.market.base import EvictionPolicy
from blendkv.market.context import current_use
from blendkv.market.worth import chunk_item
from blendkv.store.base import Chunk, HeldChunk, TierStat
from blendkv.store.quotas import Quotas
from blendkv.types import TokenIds


class MemoryTier(Generic[HeldChunk]):
    """Chunk KVs in memory. ``limit`` bounds their bytes; chunks that are pinned or in use are never evicted.

    ``weigh`` returns the bytes that a chunk holds; those of its K and V by default. A tenant at its quota makes room
    among its own chunks.
    """

    name = "memory"

    def __init__(
        self,
        limit: int,
        policy: EvictionPolicy,
        weigh: Callable[[HeldChunk], int] = lambda kv: kv.nbytes,
        quotas: Quotas | None = None,
    ) -> None:
        self._weigh = weigh
        self._quotas = quotas or Quotas()
        self.limit = limit
        self._policy = policy
        self._chunks: dict[str, HeldChunk] = {}
        self._bytes = 0
        self._tenants: Counter[str] = Counter()  # bytes by tenant
        self._pinned: set[str] = set()
        self._used: Counter[str] = Counter()  # by how many users each chunk in use
        self._evictions: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
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
                self._policy.touched(key, current_use(), time.monotonic())
            return kv

    def fits(self, nbytes: int, tenant: str = "") -> bool:
        """Whether ``nbytes`` bytes of a tenant can be held once everything that may leave for them has left."""
        quota = self._quotas.of(tenant)
        with self._lock:
            if quota is not None and nbytes > quota - self._kept_bytes(tenant):
                return False
            return nbytes <= self.limit - self._kept_bytes()

    def put(self, kv: HeldChunk) -> None:
        """Hold ``kv``, evicting others by policy; a chunk that is there already is left as it is.

        Raises
        ------
        StoreFullError
            If it is larger than what is not pinned or in use, of the limit or of the tenant's quota; nothing is
            evicted then.
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
            victims = self._victims(nbytes, self._pinned | self._used.keys())
            self._evict(victims, "limit")
            return bool(victims)

    def keep_quota(self, tenant: str, nbytes: int) -> None:
        """Evict of a tenant's own chunks until ``nbytes`` bytes more are within its quota.

        Raises
        ------
        StoreFullError
            If that cannot be; nothing is evicted then.
        """
        with self._lock:
            self._check_quota(tenant, nbytes)
            self._evict_own(tenant, nbytes)

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
                self._policy.touched(key, current_use(), time.monotonic())
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

    def tenants(self) -> dict[str, int]:
        """Bytes by tenant's tag, of those that have any."""
        with self._lock:
            return {tag: size for tag, size in self._tenants.items() if size}

    def stat(self) -> TierStat:
        """Chunks, bytes, limit and evictions."""
        with self._lock:
            return TierStat(
                *(self.name, len(self._chunks), self._bytes, self.limit),
                evictions=dict(self._evictions),
                refused=dict(self._refused),
            )

    def _add(self, kv: HeldChunk) -> HeldChunk:
        held = self._chunks.get(kv.key)
        if held is not None:
            self._policy.touched(kv.key, current_use(), time.monotonic())
            return held
        tenant, size, kept = kv.recipe.tenant, self._weigh(kv), self._kept_bytes()
        self._check_quota(tenant, size)
        if size > self.limit - kept:
            self._refused["limit"] += 1
            raise StoreFullError(
                f"a chunk KV of {size} bytes does not fit in memory: the limit is {self.limit} bytes, "
                f"{kept} of them pinned or in use; raise the limit or unpin some"
            )
        self._evict_own(tenant, size)
        excess = self._bytes + size - self.limit
        if excess > 0:
            self._evict(self._victims(excess, self._pinned | self._used.keys()), "limit")
        self._chunks[kv.key] = kv
        self._bytes += size
        self._tenants[tenant] += size
        self._policy.added(kv.key, chunk_item(len(kv.token_ids), size), current_use(), time.monotonic())
        return kv

    def _check_quota(self, tenant: str, size: int) -> None:
        quota = self._quotas.of(tenant)
        if quota is not None and size > quota - (kept := self._kept_bytes(tenant)):
            self._refused["quota"] += 1
            raise StoreFullError(self._quotas.refusal(tenant, size, kept))

    def _evict_own(self, tenant: str, size: int) -> None:
        quota = self._quotas.of(tenant)
        if quota is not None and (excess := self._tenants[tenant] + size - quota) > 0:
            keep = _Others(self._chunks, tenant, self._pinned | self._used.keys())
            self._evict(self._victims(excess, keep), "quota")

    def _victims(self, nbytes: int, keep: Container[str]) -> list[str]:
        return self._policy.victims(nbytes, keep, time.monotonic())

    def _evict(self, keys: Iterable[str], reason: str) -> None:
        for key in keys:
            self._drop(key)
            self._evictions[reason] += 1

    def _kept_bytes(self, tenant: str | None = None) -> int:
        """Bytes of what cannot leave: of all, or of one tenant's."""
        chunks = (self._chunks.get(key) for key in self._pinned | self._used.keys())
        return sum(self._weigh(kv) for kv in chunks if kv is not None and tenant in (None, kv.recipe.tenant))

    def _drop(self, key: str) -> bool:
        kv = self._chunks.pop(key, None)
        if kv is None:
            return False
        size = self._weigh(kv)
        self._bytes -= size
        self._tenants[kv.recipe.tenant] -= size
        self._policy.removed(key, time.monotonic())
        return True


class _Others(Container[str]):
    """The keys that stay while a tenant makes room: those of ``keep``, and those of everybody else."""

    def __init__(self, chunks: Mapping[str, Chunk], tenant: str, keep: Container[str]) -> None:
        self._chunks, self._tenant, self._keep = chunks, tenant, keep

    def __contains__(self, key: object) -> bool:
        kv = self._chunks.get(str(key))
        return key in self._keep or kv is None or kv.recipe.tenant != self._tenant
