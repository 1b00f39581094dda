"""What the store tells about itself: plain, frozen records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blendkv.store.base import TierStat
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
    """

    adopted: int = 0
    deleted_files: int = 0
    dropped_rows: int = 0
    temporary: int = 0

    def __bool__(self) -> bool:
        return bool(self.adopted or self.deleted_files or self.dropped_rows or self.temporary)

    def __str__(self) -> str:
        return (
            f"{self.adopted} files adopted, {self.deleted_files} unusable files deleted, "
            f"{self.dropped_rows} rows without a file dropped, {self.temporary} temporary files deleted"
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
    """

    tiers: tuple[TierStat, ...]
    collision: int
    discarded: Mapping[str, int]
    promoted: int
    not_in_memory: int
    background_errors: int
    pending_bytes: int
    pinned: int
