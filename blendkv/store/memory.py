"""The memory tier: chunk KVs in this process, up to a byte limit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Generic

from blendkv.errors import StoreFullError
from blendkv.market.appraisal import Appraiser, Lot
from blendkv.market.base import EvictionPolicy
from blendkv.market.context import current_use
from blendkv.market.eviction import AdmitsAll
from blendkv.market.hints import Hint, Hinted
from blendkv.market.policy import MarketPolicy, Standing
from blendkv.market.worth import Worth
from blendkv.store.base import Chunk, HeldChunk, TierStat
from blendkv.store.index import Placed
from blendkv.store.quotas import Quotas
from blendkv.store.reports import GIGABYTE, GROWN, MarketReport
from blendkv.types import TokenIds


class MemoryTier(Generic[HeldChunk]):
    """Chunk KVs in memory. ``limit`` bounds their bytes; chunks that are pinned or in use are never evicted.

    ``weigh`` returns the bytes that a chunk holds; those of its K and V by default. A tenant at its quota makes room
    among its own chunks. ``worth`` says what a hit saves.
    """

    name = "memory"

    def __init__(
        self,
        limit: int,
        policy: EvictionPolicy,
        weigh: Callable[[HeldChunk], int] = lambda kv: kv.nbytes,
        quotas: Quotas | None = None,
        worth: Worth | None = None,
    ) -> None:
        self._weigh = weigh
        self._worth = worth or Worth()
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
        self._opened = time.monotonic()

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

    def spare(self, nbytes: int, tenant: str = "") -> bool:
        """Whether ``nbytes`` bytes of a tenant fit beside all that is there."""
        quota = self._quotas.of(tenant)
        with self._lock:
            own = quota is None or self._tenants[tenant] + nbytes <= quota
            return own and self._bytes + nbytes <= self.limit

    def admits(self, key: str, tokens: int, nbytes: int, tenant: str = "") -> bool:
        """Whether a chunk of which a slower tier has a copy, or will, is worth what would leave for it.

        What is here, pinned, or not hindered by others is let in. A refusal is counted, and noted as a use.
        """
        if isinstance(self._policy, AdmitsAll):
            return True
        with self._lock:
            if key in self._chunks or key in self._pinned:
                return True
            leaving = self._leaving(nbytes, tenant)
            if not leaving or self._outweighs(key, tokens, nbytes, leaving):
                return True
            self._refused["price"] += 1
            return False

    def outweighs(self, key: str, tokens: int, nbytes: int, leaving: Sequence[str]) -> bool:
        """Whether a chunk is worth more than those that would leave another tier for it; if not, its use is noted."""
        with self._lock:
            return self._outweighs(key, tokens, nbytes, leaving)

    def seen(self, key: str, tokens: int, nbytes: int) -> None:
        """A chunk was used that does not fit: its price is known to the tier behind this one nevertheless."""
        with self._lock:
            self._note(key, tokens, nbytes)

    @property
    def appraiser(self) -> Callable[[Sequence[Placed]], list[float]] | None:
        """Prices chunks of the disk, those that are not here included; None if the policy cannot."""
        return self._appraise if isinstance(self._policy, Appraiser) else None

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
            victims = self._victims(nbytes, self._kept)
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

    def hint(self, session: str, what: Hint, ttl: float) -> bool:
        """Tell the policy what a session says of itself; return whether it listens."""
        if not isinstance(self._policy, Hinted):
            return False
        with self._lock:
            self._policy.hint(session, what, ttl, time.monotonic())
        return True

    def market(self, count: int) -> MarketReport | None:
        """The ``count`` chunks that would leave first, and what more memory would save; None if no price is known."""
        policy = self._policy
        if not isinstance(policy, MarketPolicy):
            return None
        with self._lock:
            now = time.monotonic()
            prices = policy.prices(count, self._pinned | self._used.keys(), now)
            grown = tuple((factor, policy.more(round(self.limit * (factor - 1)))) for factor in GROWN)
            return MarketReport(
                tuple(prices), self.limit, now - self._opened, policy.saved, grown, policy.more(GIGABYTE)
            )

    def ranked(self, count: int) -> list[Standing] | None:
        """The ``count`` dearest chunks, the dearest first; None if no price is known."""
        if not isinstance(self._policy, MarketPolicy):
            return None
        with self._lock:
            standings = self._policy.dearest(count, time.monotonic())
        return standings()

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
        try:
            self._check_quota(tenant, size)
        except StoreFullError:
            self._note(kv.key, len(kv.token_ids), size)
            raise
        if size > self.limit - kept:
            self._refused["limit"] += 1
            self._note(kv.key, len(kv.token_ids), size)
            raise StoreFullError(
                f"a chunk KV of {size} bytes does not fit in memory: the limit is {self.limit} bytes, "
                f"{kept} of them pinned or in use; raise the limit or unpin some"
            )
        self._evict_own(tenant, size)
        excess = self._bytes + size - self.limit
        if excess > 0:
            self._evict(self._victims(excess, self._kept), "limit")
        self._chunks[kv.key] = kv
        self._bytes += size
        self._tenants[tenant] += size
        self._policy.added(kv.key, self._worth.chunk(len(kv.token_ids), size), current_use(), time.monotonic())
        return kv

    def _outweighs(self, key: str, tokens: int, nbytes: int, leaving: Sequence[str]) -> bool:
        item = self._worth.chunk(tokens, nbytes)
        return self._policy.admits(key, item, current_use(), leaving, time.monotonic())

    def _leaving(self, nbytes: int, tenant: str) -> list[str]:
        """What would leave for a newcomer, of its tenant's own first; nothing if all that can leave is too little."""
        own, total = self._weights(self._quota_victims(tenant, nbytes)), self._bytes + nbytes - self.limit
        rest = self._weights(self._victims(total - sum(own.values()), _Both(self._kept, own)))
        return [*own, *rest] if sum(own.values()) + sum(rest.values()) >= total else []

    def _weights(self, keys: Iterable[str]) -> dict[str, int]:
        return {key: self._weigh(self._chunks[key]) for key in keys}

    def _note(self, key: str, tokens: int, nbytes: int) -> None:
        if isinstance(self._policy, Appraiser):
            self._policy.seen(key, self._worth.chunk(tokens, nbytes), current_use(), time.monotonic())

    def _appraise(self, rows: Sequence[Placed]) -> list[float]:
        assert isinstance(self._policy, Appraiser)
        now = time.time()
        lots = [Lot(row.key, self._worth.chunk(row.tokens, row.nbytes), now - row.last_used) for row in rows]
        with self._lock:
            return self._policy.appraise(lots, time.monotonic())

    @property
    def _kept(self) -> Container[str]:
        """What cannot leave."""
        return _Both(self._pinned, self._used)

    def _check_quota(self, tenant: str, size: int) -> None:
        quota = self._quotas.of(tenant)
        if quota is not None and size > quota - (kept := self._kept_bytes(tenant)):
            self._refused["quota"] += 1
            raise StoreFullError(self._quotas.refusal(tenant, size, kept))

    def _evict_own(self, tenant: str, size: int) -> None:
        self._evict(self._quota_victims(tenant, size), "quota")

    def _quota_victims(self, tenant: str, size: int) -> list[str]:
        """Of a tenant's own what does not fit in its quota beside ``size`` bytes."""
        quota = self._quotas.of(tenant)
        excess = 0 if quota is None else self._tenants[tenant] + size - quota
        return self._victims(excess, _Others(self._chunks, tenant, self._kept))

    def _victims(self, nbytes: int, keep: Container[str]) -> list[str]:
        return self._policy.victims(nbytes, keep, time.monotonic()) if nbytes > 0 else []

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


class _Both(Container[str]):
    """What is in either of two."""

    def __init__(self, one: Container[str], other: Container[str]) -> None:
        self._one, self._other = one, other

    def __contains__(self, key: object) -> bool:
        return key in self._one or key in self._other


class _Others(Container[str]):
    """The keys that stay while a tenant makes room: those of ``keep``, and those of everybody else."""

    def __init__(self, chunks: Mapping[str, Chunk], tenant: str, keep: Container[str]) -> None:
        self._chunks, self._tenant, self._keep = chunks, tenant, keep

    def __contains__(self, key: object) -> bool:
        kv = self._chunks.get(str(key))
        return key in self._keep or kv is None or kv.recipe.tenant != self._tenant
