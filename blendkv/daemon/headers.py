"""Parsed headers of chunk files: parsing takes longer than all the rest of a hit, so they are remembered."""

from __future__ import annotations

import xxhash

from blendkv.daemon.images import head_of
from blendkv.store.chunkfile import Header, ids_of, parse_header
from blendkv.types import TokenIds

_MOST = 1024


class Headers:
    """Headers and token ids by key, of the files seen last."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, Header, TokenIds]] = {}

    def of(self, key: str, file: memoryview) -> tuple[Header, TokenIds]:
        """The header and the token ids of the chunk file under ``key``.

        Raises
        ------
        DamagedChunkError, StoreMismatchError, InputError
            As `parse_header`.
        """
        head = head_of(file, len(file), key)
        digest = xxhash.xxh3_128_digest(head)
        known = self._known.get(key)
        if known is None or known[0] != digest:
            header = parse_header(head, len(file), key)
            known = digest, header, ids_of(header, file)
            while len(self._known) >= _MOST:
                self._known.pop(next(iter(self._known)), None)
            self._known[key] = known
        return known[1], known[2]
