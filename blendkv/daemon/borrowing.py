"""Asks the daemon for chunks, and makes readers of what it lends."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from blendkv.daemon import messages as m
from blendkv.daemon.connection import PATIENCE, Connection, DownError
from blendkv.daemon.headers import Headers
from blendkv.daemon.link import Link
from blendkv.daemon.reader import LentReader, LoadingLentReader
from blendkv.daemon.uses import words
from blendkv.errors import BlendKVError, DamagedChunkError
from blendkv.observe.tracing import detail
from blendkv.store.base import ChunkReader
from blendkv.store.chunkfile import read_header, read_span
from blendkv.store.filereader import DiskReader
from blendkv.store.index import Row
from blendkv.store.reader import KeepingReader
from blendkv.types import as_token_ids


class Borrower:
    """Borrows chunks over ``link``; safe to use from several threads.

    Parameters
    ----------
    root
        The store's folder.
    link
        To the daemon.
    counts
        Where calls that found no daemon are counted, as ``down``.
    discard
        Called with the key of a damaged chunk, and what is wrong with it.
    """

    def __init__(self, root: Path, link: Link, counts: Counter[str], discard: Callable[[str, str], None]) -> None:
        self._root = root
        self._link = link
        self._counts = counts
        self._discard = discard
        self._headers = Headers()

    def borrow(self, keys: Sequence[str]) -> list[ChunkReader | None]:
        """A reader for each chunk, None where there is none: a chunk is lent while its reader or tensors live.

        What does not come in time, because the daemon is gone or a tier is slow, is not there.

        Raises
        ------
        StoreError
            If the daemon could not serve one of them.
        """
        found: list[ChunkReader | None] = []
        failure: BlendKVError | None = None
        for first in range(0, len(keys), m.MOST_KEYS):
            some = keys[first : first + m.MOST_KEYS]
            try:
                connection = self._link.connection()
                replies = self._ask(connection, some)
            except DownError:
                self._counts["down"] += 1
                found += [None] * len(some)
                continue
            for key, reply in zip(some, replies, strict=True):
                found.append(None)
                try:
                    found[-1] = self._reader(connection, key, reply)
                except DownError:
                    self._counts["down"] += 1
                except BlendKVError as error:
                    failure = failure or error
        if failure is not None:
            raise failure
        return found

    def _ask(self, connection: Connection, keys: Sequence[str]) -> list[tuple[m.Reply, list[int]] | BlendKVError]:
        with detail("daemon", request="Get", chunks=len(keys)) as told:
            request = m.Get([bytes.fromhex(key) for key in keys], *words())
            replies = connection.ask_each(request, len(keys), PATIENCE)
            told.set(lent=sum(isinstance(reply, tuple) and isinstance(reply[0], m.Lent) for reply in replies))
        return replies

    def _reader(
        self, connection: Connection, key: str, answer: tuple[m.Reply, list[int]] | BlendKVError
    ) -> ChunkReader | None:
        if isinstance(answer, BlendKVError):
            raise answer
        reply, fds = answer
        try:
            if isinstance(reply, m.Direct):
                return self._direct(connection, key, fds[0], reply.loan)
            return self._lent(connection, key, reply) if isinstance(reply, m.Lent) else None
        except DamagedChunkError as error:
            self._discard(key, error.reason)
            return None

    def _lent(self, connection: Connection, key: str, reply: m.Lent) -> ChunkReader:
        loan = connection.loan(reply.loan)
        try:
            memory = np.frombuffer(connection.window.view(reply.offset, reply.size), np.uint8)
        except BaseException:
            self._link.over(connection, reply.loan)
            raise
        # All views of the file hold this array: the loan is over when the reader and its last tensor are gone.
        weakref.finalize(memory, self._link.over, connection, reply.loan)
        file = memory.data
        header, token_ids = self._headers.of(key, file)
        if reply.ready == header.layers:
            return LentReader(key, header, token_ids, file, loan)
        connection.expect(loan, header.layers, reply.offset, reply.size)
        return LoadingLentReader(key, header, token_ids, file, loan, reply.tier, reply.ready)

    def _direct(self, connection: Connection, key: str, fd: int, loan: int) -> ChunkReader:
        """A reader of the file itself, or of a copy of its own: the chunk had no room in the daemon's memory."""
        try:
            reader = self._open(key, fd)
        except BaseException:
            if loan:
                self._link.over(connection, loan)
            raise
        if loan:
            weakref.finalize(reader, self._link.over, connection, loan)
        return KeepingReader(reader, False, lambda kv: None, lambda error: self._discard(error.key, error.reason))

    def _open(self, key: str, fd: int) -> DiskReader:
        try:
            header = read_header(fd, key)
            span = header.tensors["token_ids"]
            data = memoryview(bytearray(span.size))
            read_span(fd, key, span, data)
        except BaseException:
            os.close(fd)
            raise
        ids = as_token_ids(np.frombuffer(data, dtype="<i4"))
        row = Row(key, header.fingerprint, header.recipe, ids, header.nbytes, header.file_bytes, "", 0.0, 0.0)
        return DiskReader(self._root, row, fd)
