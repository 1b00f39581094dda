"""The store of an engine's own process: chunk KVs as tensors in memory, and on disk behind them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from blendkv.errors import DamagedChunkError, InputError, StoreFullError
from blendkv.market.base import USUAL
from blendkv.market.worth import Worth
from blendkv.store.base import ChunkReader
from blendkv.store.core import TieredStore
from blendkv.store.memory import MemoryTier
from blendkv.store.opening import open_disk
from blendkv.store.policy import disk_policy, tier_policy
from blendkv.store.quotas import Quotas
from blendkv.store.reader import KeepingReader
from blendkv.store.remote import open_remote
from blendkv.store.remotes import Remotes
from blendkv.store.reports import RepairReport
from blendkv.types import ChunkKV, TokenIds

_log = logging.getLogger(__name__)


class KVStore(TieredStore[ChunkKV]):
    """Chunk KVs by key, in memory first, then on disk. Open one with :meth:`open`; close it, or use ``with``.

    A key matches only together with its token ids. Tensors may lie on any device when they are put; they are kept
    contiguous and on the CPU. Stored tensors are shared, not copied: write neither into those given nor into those
    received.
    """

    @classmethod
    def open(
        cls,
        path: Path | str | None,
        *,
        memory_bytes: int,
        disk_bytes: int | None = None,
        policy: str = USUAL,
        remotes: Sequence[str] = (),
        namespace: str = "default",
        quotas: Quotas | None = None,
        encrypt: bool | None = None,
        prefill_rate: float | None = None,
    ) -> KVStore:
        """Open the store at ``path``, creating it where there is none; None keeps everything in memory only.

        Parameters
        ----------
        path
            A directory of the store's own.
        memory_bytes, disk_bytes
            Limits in bytes; no disk limit by default.
        policy
            Name of the eviction policy of both tiers (`blendkv.market.policies`). With ``market`` what would push
            something dearer out of memory stays on disk only, and what memory's policy knows ranks the disk as well.
        remotes, namespace
            URLs of remote tiers, fastest first, and whose chunks are seen there; see `open_remote`. They need a
            ``path``.
        quotas
            Bytes that each tenant may have in memory, and on disk; none by default.
        encrypt
            Whether what is on disk is encrypted with the key in ``BLENDKV_ENCRYPTION_KEY``; by default as the store
            is, a new one is not. It stays as it was made.
        prefill_rate
            Tokens per second that the engine prefills, for what a hit saves; 5,000 by default. It matters where chunks
            of several models or codecs are here.

        Raises
        ------
        InputError
            If a limit is negative, the rate is not above 0, the policy is unknown, or ``path`` holds something else; if
            the store is encrypted and the key is missing or another one, or ``encrypt`` is not how it is.
        StoreMismatchError
            If a newer version of BlendKV made the store.
        StoreError
            If it cannot be read or written.
        """
        for name, limit in (("memory_bytes", memory_bytes), ("disk_bytes", disk_bytes)):
            if limit is not None and limit < 0:
                raise InputError(f"{name} is {limit}; give 0 or more bytes")
        rule, worth = tier_policy(policy, memory_bytes), Worth.at(prefill_rate)
        memory: MemoryTier[ChunkKV] = MemoryTier(memory_bytes, rule, quotas=quotas, worth=worth)
        if path is None:
            if remotes:
                raise InputError("remote tiers were given for a store in memory only; give it a folder")
            if encrypt:
                raise InputError("encrypt was given for a store in memory only; give it a folder")
            return cls(memory, None, RepairReport(), quotas=quotas)
        tiers = [open_remote(url, namespace=namespace) for url in remotes]
        root = Path(path).expanduser()
        disk, repair = open_disk(root, disk_bytes, disk_policy(policy, disk_bytes), _file_of, quotas, encrypt)
        return cls(memory, disk, repair, Remotes(tiers, _file_of) if tiers else None, quotas)

    def get(self, key: str, token_ids: TokenIds) -> ChunkReader | None:
        """Return a reader for the chunk, or None.

        A chunk from disk moves to memory once all its layers were read, if the policy finds it worth what would leave
        for it. One that turns out damaged is dropped and counted: None if it shows at once, :class:`DamagedChunkError`
        from ``layer`` if it shows later.
        """
        self._check_open()
        with self._timings.timed("memory get"):
            kept = self._memory.get(key)
            if kept is None:
                kept = self._writer.pending(key)
        if self._answer("memory", kept, token_ids):
            if self._disk is not None:
                self._disk.index.touch(key)
            return kept
        if kept is not None or self._disk is None:
            return None
        try:
            with self._timings.timed("disk get"):
                reader = self._disk.get(key)
        except DamagedChunkError as error:
            self._damaged(error)
            reader = None
        if reader is not None:
            if not self._answer("disk", reader, token_ids):
                return None
            keep = self._memory.fits(reader.nbytes, reader.recipe.tenant)
            if not keep:
                self._memory.seen(key, len(reader.token_ids), reader.nbytes)
            return KeepingReader(
                reader, keep, self._promote, self._damaged, partial(self._timings.add, "disk load")
            )  # fmt: skip
        self._answer("disk", None, token_ids)
        return self._get_remote(key, token_ids)

    def get_all(self, wanted: Sequence[tuple[str, TokenIds]]) -> list[ChunkReader | None]:
        """`get` for many chunks, each a key and its token ids."""
        return [self.get(key, token_ids) for key, token_ids in wanted]

    def _get_remote(self, key: str, token_ids: TokenIds) -> ChunkReader | None:
        reader = self._from_remote(key)
        if reader is None or not np.array_equal(reader.token_ids, token_ids):
            return None
        return KeepingReader(reader, True, self._come, self._remote_damaged)

    def _come(self, kv: ChunkKV) -> None:
        """A chunk has come whole from a remote tier."""
        if self._closed:
            return
        try:
            if self._let_in(kv):
                self._memory.put(kv)
        except StoreFullError:
            self._count("not in memory")
        self._keep_remote(kv)

    def _remote_damaged(self, error: DamagedChunkError) -> None:
        self._count("failed loads")
        _log.info("a remote tier: %s", error)

    def _checked(self, kv: ChunkKV) -> ChunkKV:
        from blendkv.store.normalise import normalised

        return normalised(kv)

    def _promote(self, kv: ChunkKV) -> None:
        with self._moving:
            if self._closed or self._disk is None or not self._disk.contains(kv.key):  # removed while it was read
                return
            try:
                if self._let_in(kv):
                    self._memory.put(kv)
                    self._count("promoted")
            except StoreFullError:
                self._count("not in memory")


def _file_of(kv: ChunkKV) -> memoryview:
    from blendkv.store.tensors import encode_chunk

    return encode_chunk(kv)
