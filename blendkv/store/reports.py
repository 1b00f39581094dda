"""What the store tells about itself: plain, frozen records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from blendkv.market.policy import Price
from blendkv.store.base import TierStat
from blendkv.store.guard import RemoteStat
from blendkv.types import Recipe


@dataclass(frozen=True)
class RepairReport:
    """What opening a store, or a sweep, put right.

    Attributes
    ----------
    adopted
        Whole files without an index row that got their row back.
    deleted_files
        Files without an index row that could not be used.
    dropped_rows
        Index rows whose file was gone.
    temporary
        Temporary files whose writer was gone.
    recounted
        Tenants whose running totals were wrong.
    """

    adopted: int = 0
    deleted_files: int = 0
    dropped_rows: int = 0
    temporary: int = 0
    recounted: int = 0

    def __bool__(self) -> bool:
        return self != RepairReport()

    def __str__(self) -> str:
        sums = f", {self.recounted} tenants counted anew" if self.recounted else ""
        return (
            f"{self.adopted} files adopted, {self.deleted_files} unusable files deleted, "
            f"{self.dropped_rows} rows without a file dropped, {self.temporary} temporary files deleted{sums}"
        )


@dataclass(frozen=True)
class VerifyReport:
    """Result of reading every file: chunks and bytes of K and V checked, and (key, reason) of those dropped."""

    checked: int
    bytes: int
    damaged: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class GcReport:
    """Result of a clean-up: chunks evicted, the bytes of their files, and what the sweep put right."""

    evicted: int
    evicted_bytes: int
    repair: RepairReport


GROWN = (1.5, 2.0, 4.0)
"""Sizes of the memory, as multiples of its limit, of which a report says what they would have saved."""
GIGABYTE = 10**9


@dataclass(frozen=True)
class MarketReport:
    """What the chunks in memory are worth, and what more memory would have been.

    Attributes
    ----------
    prices
        The chunks that would leave first, in that order; those that are pinned or in use stay.
    limit
        Bytes of the memory.
    seconds
        How long the prices have been kept: since the store was opened.
    saved
        Seconds of prefill that hits in memory have saved in that time.
    grown
        (multiple of the limit, seconds that it would have saved besides): `GROWN`.
    gigabyte
        Seconds that one gigabyte more would have saved besides.
    """

    prices: tuple[Price, ...]
    limit: int
    seconds: float
    saved: float
    grown: tuple[tuple[float, float], ...]
    gigabyte: float

    @property
    def marginal(self) -> float:
        """Seconds per hour that the next gigabyte would save."""
        return 3600.0 * self.gigabyte / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class ChunkInfo:
    """One row of a listing. Sizes are in bytes, times in seconds since the epoch; None for what only a file has."""

    key: str
    fingerprint: str
    recipe: Recipe
    tokens: int
    nbytes: int
    file_bytes: int | None
    created: float | None
    last_used: float | None
    pinned: bool
    tiers: tuple[str, ...]


@dataclass(frozen=True)
class TenantUse:
    """What a tenant has here: its tag (empty: chunks of no tenant), its name if that is known, and its quota in bytes.

    The quota holds for memory and for disk, each. ``chunks`` counts those on disk.
    """

    tag: str
    name: str | None
    chunks: int
    memory_bytes: int
    disk_bytes: int
    quota: int | None


@dataclass(frozen=True)
class StoreStat:
    """Counts since the store was opened, and what it holds now.

    Attributes
    ----------
    tiers
        One record per tier, fastest first.
    collision
        Look-ups and puts whose key was there with other token ids.
    discarded
        Damaged chunks that were dropped, by kind of damage (``missing``, ``truncated``, ``checksum``, ``header``,
        ``mismatch``, ``unreadable``, or what :meth:`KVStore.discard` was told).
    promoted
        Chunks that went from disk to memory.
    not_in_memory
        Chunks that did not fit in memory, on a put or a promotion.
    background_errors
        Chunks that :meth:`KVStore.put_async` could not store.
    pending_bytes
        Bytes of K and V that wait for the background writer.
    pinned
        Pinned chunks.
    remotes
        What was asked of each remote tier, and what came of it.
    uploaded, not_uploaded
        Chunks written to a remote tier, and those that could not be.
    upload_pending_bytes
        Bytes of K and V that wait to be written to remote tiers.
    pending_chunks, upload_pending_chunks
        How many chunks wait, for the background writer and for remote tiers.
    failed_loads
        Chunks that could not be read to their end although nothing is wrong with them: their tier did not answer.
    tenants
        What each tenant has, those with a quota of their own and those with chunks.
    tenant_quota
        Bytes that every other tenant may have.
    """

    tiers: tuple[TierStat, ...]
    collision: int
    discarded: Mapping[str, int]
    promoted: int
    not_in_memory: int
    background_errors: int
    pending_bytes: int
    pinned: int
    remotes: tuple[RemoteStat, ...] = ()
    uploaded: int = 0
    not_uploaded: int = 0
    upload_pending_bytes: int = 0
    failed_loads: int = 0
    pending_chunks: int = 0
    upload_pending_chunks: int = 0
    tenants: tuple[TenantUse, ...] = ()
    tenant_quota: int | None = None

    def quota(self, tag: str) -> int | None:
        """Bytes that a tenant may have in a local tier; None without a limit."""
        own = next((use.quota for use in self.tenants if use.tag == tag), self.tenant_quota)
        return own if tag else None

    @property
    def named_remotes(self) -> list[tuple[str, RemoteStat]]:
        """Remote tiers by a name of their own: of two buckets, the second is ``s3_2``."""
        seen: Counter[str] = Counter()
        found = []
        for remote in self.remotes:
            seen[remote.name] += 1
            number = seen[remote.name]
            found.append((remote.name if number == 1 else f"{remote.name}_{number}", remote))
        return found
