"""The daemon's index, as those read it who look for chunks by their content."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blendkv.daemon import messages as m
from blendkv.daemon.link import Link
from blendkv.store.base import IndexEntry
from blendkv.store.chunkfile import recipe_from_json


class RemoteIndex:
    """An `IndexReader`; every call raises `DownError`, a `StoreError`, while no daemon answers."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def version(self) -> int:
        """A number that differs from the last one if any chunk was added, removed, pinned or noted as used since."""
        connection = self._link.connection()
        # Another daemon counts anew: its numbers must not look like those of the one before.
        return hash((connection.number, connection.ask(m.IndexVersion(), m.Number).value))

    def count(self, tenant: str | None = None) -> int:
        """Number of chunks."""
        return self._link.connection().ask(m.IndexCount(tenant), m.Number).value

    def keys(self, *, tenant: str | None = None) -> set[str]:
        """The keys of all chunks."""
        data = self._link.connection().ask(m.IndexKeys(tenant), m.Blob).data
        return {data[place : place + 32].hex() for place in range(0, len(data), 32)}

    def changed_since(self, tick: int, tenant: str | None = None) -> list[tuple[str, int, int]]:
        """(key, bytes of the file, tick) of what was added or used after ``tick``, oldest first; ticks start at 1."""
        rows = self._link.connection().ask(m.IndexChanged(tick, tenant), m.Changes).rows
        return [(key.hex(), size, at) for key, size, at in rows]

    def entries(self, keys: Sequence[str]) -> list[IndexEntry]:
        """The entries of those of ``keys`` that are there, in no order."""
        found: list[IndexEntry] = []
        for first in range(0, len(keys), m.MOST_KEYS):
            some = [bytes.fromhex(key) for key in keys[first : first + m.MOST_KEYS]]
            reply = self._link.connection().ask(m.IndexEntries(some), m.Entries)
            found += [_entry(entry) for entry in reply.entries]
        return found


def _entry(entry: m.Entry) -> IndexEntry:
    ids = np.frombuffer(entry.token_ids, dtype="<i4").astype(np.int32, copy=False)
    return IndexEntry(entry.key.hex(), entry.fingerprint, recipe_from_json(entry.recipe), ids)
