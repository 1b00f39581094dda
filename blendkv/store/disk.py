"""The disk tier: one file per chunk KV under ``kv/``, named by its key, and the index."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Generic

from blendkv.errors import DamagedChunkError, StoreError, StoreFullError
from blendkv.market.base import NOBODY, EvictionPolicy
from blendkv.market.worth import file_item
from blendkv.store.base import Chunk, HeldChunk, TierStat
from blendkv.store.filereader import FileReader
from blendkv.store.files import fsync_directory, make_directory, temporary_file, write_all
from blendkv.store.forms import Form, PlainForm
from blendkv.store.hand import Appraise, Hand
from blendkv.store.index import Index, Row
from blendkv.store.quotas import Quotas
from blendkv.types import TokenIds

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Evicting the new file's size once should do; concurrent writers and whole blocks may want it again. A bound, because
# a device that others fill must not cost the whole store.
_FULL_TRIES = 3
_MOST_HANDS = 256


class DiskTier(Generic[HeldChunk]):
    """Chunk KVs on a local disk. ``limit`` bounds the bytes of the files (None: no limit), pinned ones included.

    ``encode`` returns the file of a chunk as it is held in memory, ``form`` is how it lies on the disk. Without a
    ``policy`` the least recently used goes first, in the order that the index has: a policy holds every key in this
    process, 350 MB for a million. With `appraise_by` the cheapest of some goes first instead (`blendkv.store.hand`), by
    what the policy of the tier before this one knows. A tenant at its quota makes room among its own chunks, the
    cheapest or the least recently used first.

    Every change of a file's name and of its row happens inside one write transaction of the index, so that processes
    which share the store never see one without the other; only a crash can part them, and a sweep mends that.
    """

    name = "disk"

    def __init__(
        self,
        root: Path,
        index: Index,
        limit: int | None,
        policy: EvictionPolicy | None,
        encode: Callable[[HeldChunk], memoryview],
        form: Form | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self._encode = encode
        self.form = form or PlainForm()
        self.quotas = quotas or Quotas()
        self.root = root
        self.index = index
        self.limit = limit
        self._policy = policy
        self._appraise: Appraise | None = None
        self._hands: dict[str | None, Hand] = {}  # by tenant; None: of all
        self._seen = 0  # the last tick of the index that the policy knows of
        self._evictions: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def appraise_by(self, appraise: Appraise) -> None:
        """Evict what is cheapest by ``appraise`` from here on; it is called in transactions of the index."""
        self._appraise = appraise

    def refuses(self, key: str, nbytes: int, tenant: str, outweighs: Callable[[Sequence[str]], bool]) -> bool:
        """Whether a chunk is not worth what would have to leave for it, as ``outweighs`` says; counts it then.

        One for which there is room, or is none whatever leaves, is not refused here.
        """
        if self._appraise is None or self.contains(key):
            return False
        with self._errors(), self.index.transaction():
            leaving = self._leaving(self._appraise, tenant, nbytes)
        if not leaving or outweighs(leaving):
            return False
        self._refused["price"] += 1
        return True

    def _leaving(self, appraise: Appraise, tenant: str, size: int) -> list[str]:
        """What would leave for a newcomer; hands of their own look for it, so that those that evict stay in place."""
        quota = self.quotas.of(tenant)
        own = 0 if quota is None else self.index.totals(tenant)[1] + size - quota
        if own > 0:
            return self._hand(appraise, tenant).copy().victims(own)
        total = 0 if self.limit is None else self.index.totals()[1] + size - self.limit
        return self._hand(appraise, None).copy().victims(total)

    def token_ids(self, key: str) -> TokenIds | None:
        """Token ids stored under ``key``, from the index, or None."""
        row = self.index.row(key)
        return None if row is None else row.token_ids

    def contains(self, key: str) -> bool:
        """Whether the index has ``key``."""
        return self.index.place(key) is not None

    def open(self, key: str) -> FileReader | None:
        """Open the file of ``key``, or return None; does not count as a use.

        Raises
        ------
        DamagedChunkError
            If the index has it and the file cannot be used.
        """
        row = self.index.row(key)
        if row is None:
            return None
        try:
            return self.form.open(self.root / row.path, row)
        except DamagedChunkError:
            # It may be on its way out, or be stored anew: only under the write lock is a fault certain.
            with self._errors(), self.index.transaction():
                row = self.index.row(key)
                return None if row is None else self.form.open(self.root / row.path, row)

    def get(self, key: str) -> FileReader | None:
        """Open the file of ``key``, or return None; counts as a use.

        Raises
        ------
        DamagedChunkError
            If the index has it and the file cannot be used.
        """
        reader = self.open(key)
        if reader is not None:
            self.index.touch(key)
        return reader

    def put(self, kv: HeldChunk) -> None:
        """Write ``kv``: its file first, then its row. A chunk that is there already is left as it is.

        Raises
        ------
        StoreFullError
            If the device is full, or the limit or the tenant's quota is reached, and eviction does not help.
        StoreError
            If the file cannot be written, or another chunk has the key.
        InputError
            If the chunk cannot be kept in the store's form.
        """
        if self._present(kv):
            self.index.touch(kv.key)
            return
        data = self.form.pack(kv.key, self._encode(kv))
        size = sum(memoryview(piece).nbytes for piece in data)
        with self._errors():
            for _ in range(_FULL_TRIES):
                try:
                    self._write(kv, data, size)
                    return
                except OSError as error:
                    if error.errno not in _FULL or not self._evict_for_space(kv.recipe.tenant, size):
                        raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def delete(self, key: str) -> bool:
        """Delete the file and the row of ``key``; return whether it was there.

        Raises
        ------
        StoreError
            If the directory cannot be written.
        """
        with self._errors(), self.index.transaction():
            return self._drop(key) is not None

    def shrink(self) -> tuple[int, int]:
        """Evict down to the quotas and the limit; return the number of chunks and the bytes that left.

        Raises
        ------
        StoreError
            If the directory cannot be written.
        """
        with self._errors(), self.index.transaction():
            left = [self._evict(size - quota, "quota", tag) for tag, _, size, quota in self._limited()]
            if self.limit is not None:
                left.append(self._evict(self.index.totals()[1] - self.limit, "limit"))
            return sum(count for count, _ in left), sum(size for _, size in left)

    def _limited(self) -> list[tuple[str, int, int, int]]:
        """(tag, chunks, bytes, quota) of the tenants that have a quota."""
        rows = self.index.tenants()
        return [(*row, quota) for row in rows if (quota := self.quotas.of(row[0])) is not None]

    def drop_page_cache(self, keys: Iterable[str]) -> None:
        """Drop the files of ``keys`` from the kernel's page cache: the next read is cold. For benchmarks.

        Raises
        ------
        StoreError
            If a key is not there, or the system has no such call.
        """
        if not hasattr(os, "posix_fadvise"):
            raise StoreError("this system cannot drop a file from its page cache; measure cold reads on Linux")
        for key in keys:
            place = self.index.place(key)
            if place is None:
                raise StoreError(f"no chunk KV {key[:12]} on disk; list the store for its keys")
            fd = os.open(self.root / place[0], os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def stat(self) -> TierStat:
        """Chunks, bytes of their files, limit and evictions."""
        chunks, size = self.index.totals()
        evictions, refused = dict(self._evictions), dict(self._refused)
        return TierStat(self.name, chunks, size, self.limit, evictions=evictions, refused=refused)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise StoreFullError(
                    f"no space on the device of {self.root}, even after eviction; free some, or set a disk limit"
                ) from error
            raise StoreError(f"cannot write to the store at {self.root}: {error.strerror}; check its rights") from error

    def _write(self, kv: Chunk, data: Sequence[bytes | memoryview], size: int) -> None:
        relative = chunk_path(kv.key, self.form.suffix)
        target = self.root / relative
        make_directory(target.parent)
        with temporary_file(target) as (fd, temporary):
            for piece in data:
                write_all(fd, piece)
            os.fsync(fd)
            with self.index.transaction() as undo:
                if self._present(kv):  # another thread or process was faster
                    return
                self.index.delete(kv.key)  # a row whose file is gone
                self._make_room(kv.recipe.tenant, size)
                os.replace(temporary, target)
                undo.append(target.unlink)
                fsync_directory(target.parent)
                now = time.time()
                self.index.insert(
                    Row(kv.key, kv.fingerprint, kv.recipe, kv.token_ids, kv.nbytes, size, relative, now, now)
                )

    def _present(self, kv: Chunk) -> bool:
        row = self.index.row(kv.key)
        if row is None:
            return False
        if not same_chunk(row, kv):
            raise StoreError(f"another chunk is stored under the key {kv.key[:12]}; remove it first")
        return (self.root / row.path).exists()

    def _make_room(self, tenant: str, size: int) -> None:
        limit = self.limit
        pinned = 0 if limit is None else sum(self.index.pinned().values())
        if limit is not None and size > limit - pinned:
            self._refused["limit"] += 1
            raise StoreFullError(
                f"a chunk KV of {size} bytes does not fit on disk: the limit is {limit} bytes, {pinned} of them "
                "pinned; raise the limit or unpin some"
            )
        self._make_quota(tenant, size)
        if limit is not None:
            self._evict(self.index.totals()[1] + size - limit, "limit")

    def _make_quota(self, tenant: str, size: int) -> int:
        """Evict of a tenant's own what does not fit in its quota beside ``size`` bytes; return the bytes that left."""
        quota = self.quotas.of(tenant)
        if quota is None:
            return 0
        pinned = self.index.pinned_bytes(tenant)
        if size > quota - pinned:
            self._refused["quota"] += 1
            raise StoreFullError(self.quotas.refusal(tenant, size, pinned))
        return self._evict(self.index.totals(tenant)[1] + size - quota, "quota", tenant)[1]

    def _evict_for_space(self, tenant: str, size: int) -> int:
        # A tenant over its quota gives first: its put must not cost others anything as long as it is.
        with self.index.transaction():
            return self._make_quota(tenant, size) or self._evict(size, "full")[0]

    def _evict(self, needed: int, reason: str, tenant: str | None = None) -> tuple[int, int]:
        """Evict ``needed`` bytes, of one tenant's or of all; return the number of chunks and the bytes that left."""
        if needed <= 0:
            return 0, 0
        self.index.apply_touches()
        count = freed = 0
        # A victim may be gone, evicted by another process: then it frees nothing and the policy is asked again.
        while freed < needed and (victims := self._victims(needed - freed, tenant)):
            for key in victims:
                dropped = self._drop(key)
                if self._policy is not None:
                    self._policy.removed(key, time.monotonic())
                if dropped is not None:
                    count, freed = count + 1, freed + dropped
        self._evictions[reason] += count
        return count, freed

    def _victims(self, nbytes: int, tenant: str | None) -> list[str]:
        if self._appraise is not None:
            return self._hand(self._appraise, tenant).victims(nbytes)
        if self._policy is None or tenant is not None:
            return self.index.oldest(nbytes, tenant)
        for key, size, tick in self.index.changed_since(self._seen):
            self._policy.added(key, file_item(size), NOBODY, time.monotonic())
            self._seen = tick
        return self._policy.victims(nbytes, self.index.pinned(), time.monotonic())

    def _hand(self, appraise: Appraise, tenant: str | None) -> Hand:
        if tenant not in self._hands and len(self._hands) >= _MOST_HANDS:
            self._hands.clear()
        return self._hands.setdefault(tenant, Hand(self.index, appraise, tenant))

    def _drop(self, key: str) -> int | None:
        found = self.index.place(key)
        if found is None:
            return None
        path, size = found
        # The file first: on a full device its space is what lets the index write at all.
        (self.root / path).unlink(missing_ok=True)
        self.index.delete(key)
        return size


def chunk_path(key: str, suffix: str = ".safetensors") -> str:
    """Path of a chunk file, relative to the store."""
    return f"kv/{key[:2]}/{key}{suffix}"


def same_chunk(one: Chunk | Row, other: Chunk) -> bool:
    """Whether two chunks agree in all that a key stands for."""
    return (
        one.fingerprint == other.fingerprint
        and one.recipe == other.recipe
        and one.token_ids.tobytes() == other.token_ids.tobytes()
    )
