"""What a store does when there is no room for all: who is let into memory, and what is worth storing at all."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from functools import partial
from typing import Protocol, runtime_checkable

from blendkv.errors import StoreFullError
from blendkv.store.base import HeldChunk
from blendkv.store.disk import DiskTier
from blendkv.store.pricing import Priced


@runtime_checkable
class Selective(Protocol):
    """A store that can tell what earns its bytes."""

    def earns(self, key: str, tokens: int, nbytes: int, tenant: str = "") -> bool:
        """Whether a chunk that is not stored is worth what would have to leave for it; if not, its use is noted."""


class Pressed(Priced[HeldChunk]):
    """A store whose memory takes what is worth it, and has a disk behind it for the rest; or takes all that fits."""

    _disk: DiskTier[HeldChunk] | None

    def earns(self, key: str, tokens: int, nbytes: int, tenant: str = "") -> bool:
        """Whether a chunk that is not stored is worth what would have to leave the store for it.

        True where there is room, or the policy lets everything in. A refusal is counted in the slowest tier, and noted
        as a use: a chunk that is asked for again soon enough comes in.

        Parameters
        ----------
        key
            Of the chunk.
        tokens, nbytes
            Its length, and the bytes that it takes as it is stored.
        tenant
            Tag of whose it is.

        Raises
        ------
        StoreError
            If the store is closed, or its index cannot be read.
        """
        self._check_open()
        if self._disk is None:
            return self._memory.admits(key, tokens, nbytes, tenant)
        return not self._disk.refuses(key, nbytes, tenant, partial(self._memory.outweighs, key, tokens, nbytes))

    @abstractmethod
    def _hold(self, kv: HeldChunk) -> HeldChunk:
        """Put ``kv`` in memory; return it as it is held there."""

    def _appraise_disk(self) -> None:
        """Let what memory's policy knows decide what leaves the disk, if it knows of more than memory holds."""
        appraise = self._memory.appraiser
        if self._disk is not None and appraise is not None:
            self._disk.appraise_by(appraise)

    def _let_in(self, kv: HeldChunk) -> bool:
        """Whether memory takes a chunk that the disk has too, or will; without a disk it takes all."""
        if self._disk is None:
            return True
        return self._memory.admits(kv.key, len(kv.token_ids), self._size(kv), kv.recipe.tenant)

    @abstractmethod
    def _size(self, kv: HeldChunk) -> int:
        """Bytes that ``kv`` takes in memory."""

    def _rescue(self, kv: HeldChunk) -> None:
        """What could not be written to disk stays in memory, whatever it is worth, if it fits."""
        if not self._memory.contains(kv.key) and self._memory.fits(self._size(kv), kv.recipe.tenant):
            with suppress(StoreFullError):  # others may be faster
                self._hold(kv)
