"""Memory beside the arena: for chunks that find no room in it and that a client cannot read by itself."""

from __future__ import annotations

import threading
from contextlib import closing

from blendkv.daemon.images import LayerSource
from blendkv.daemon.shm import Parcel

LEAST_ROOM = 256 << 20
"""Bytes that may lie aside, or a quarter of the arena if that is more."""


class Aside:
    """A whole chunk file in sealed memory of its own, until `Asides.back`; a client gets its descriptor."""

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel


class Asides:
    """Reads chunks into memory of their own, ``limit`` bytes at a time, or one chunk if it is larger."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._lock = threading.Lock()

    def read(self, source: LayerSource) -> Aside | None:
        """Read all of ``source`` and close it; None if too much lies aside already.

        Raises
        ------
        DamagedChunkError, UnavailableChunkError
            As the source.
        """
        size = source.header.file_bytes
        with self._lock:
            if self._bytes and self._bytes + size > self._limit:
                source.close()
                return None
            self._bytes += size
        try:
            with closing(source):
                return Aside(_filled(source, size))
        except BaseException:
            self._free(size)
            raise

    def back(self, aside: Aside) -> None:
        """A client does not need it any more."""
        self._free(aside.parcel.size)

    def _free(self, size: int) -> None:
        with self._lock:
            self._bytes -= size


def _filled(source: LayerSource, size: int) -> Parcel:
    parcel = Parcel.create(size)
    with parcel.writable() as file:
        source.fill_head(file)
        for index in range(source.header.layers):
            source.fill(index, file)
    parcel.seal()
    return parcel
