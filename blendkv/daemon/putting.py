"""How a client hands a chunk over: in memory that both sides keep mapped, where it fits, else in memory of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from blendkv.daemon import messages as m
from blendkv.daemon.connection import Connection, DownError
from blendkv.daemon.link import Link
from blendkv.daemon.shm import Buffer, Parcel
from blendkv.daemon.uses import words
from blendkv.types import ChunkKV

GRACE = 5.0
"""Seconds for which a put waits for a daemon that was there a moment ago."""
BUFFER_BYTES = 64 << 20
"""Bytes of the largest buffer that is kept; what is larger goes in memory of its own."""
_TRIES = 3


class Handover:
    """Puts chunks to the daemon behind ``link``; safe to use from several threads.

    To fill fresh memory costs a page fault per page, four times as much as to fill a buffer again. There is one buffer:
    while it is in use, other puts go in memory of their own.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._buffer: Buffer | None = None
        self._offered: Connection | None = None  # to whom the buffer is known
        self._busy = threading.Lock()

    def put(self, kv: ChunkKV) -> None:
        """Hand over ``kv``; returns when it is on disk.

        Raises
        ------
        InputError, StoreError
            As `DaemonStore.put`.
        """
        self._link.connection(GRACE)  # before the work of encoding
        own = self._busy.acquire(blocking=False)
        try:
            self._put(kv, own)
        finally:
            if own:
                self._busy.release()

    def _put(self, kv: ChunkKV, may_buffer: bool) -> None:
        from blendkv.store.tensors import encode_chunk

        parcels: list[Parcel] = []

        def allocate(size: int) -> memoryview:
            if may_buffer and size <= BUFFER_BYTES:
                return self._room(size).view()[:size]
            parcels.append(Parcel.create(size))
            return parcels[0].writable()

        file, key = encode_chunk(kv, allocate), bytes.fromhex(kv.key)
        size = file.nbytes
        file.release()
        if not parcels:
            self._try(lambda connection: self._send(connection, m.PutFrom(key, size, *words())))
            return
        parcels[0].seal()
        self._try(lambda connection: connection.ask(m.Put(key, *words()), m.Done, (parcels[0].fd,)))

    def _room(self, size: int) -> Buffer:
        if self._buffer is None or self._buffer.size < size:
            self._buffer, self._offered = Buffer.create(size), None
        return self._buffer

    def _send(self, connection: Connection, request: m.PutFrom) -> None:
        assert self._buffer is not None
        if self._offered is not connection:
            connection.ask(m.PutBuffer(), m.Done, (self._buffer.fd,))
            self._offered = connection
        connection.ask(request, m.Done)

    def _try(self, send: Callable[[Connection], object]) -> None:
        for tries_left in reversed(range(_TRIES)):  # a put of what is there already does nothing
            try:
                send(self._link.connection(GRACE))
                return
            except DownError:
                if not tries_left:
                    raise
