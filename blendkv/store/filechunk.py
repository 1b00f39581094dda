"""A chunk file that came from outside, checked to the last byte."""

from __future__ import annotations

from dataclasses import dataclass

from blendkv.errors import DamagedChunkError
from blendkv.store.chunkfile import Header, check_span, ids_of, parse_header, token_ids_digest
from blendkv.types import Recipe, TokenIds, chunk_key


@dataclass(frozen=True)
class FileChunk:
    """A whole, verified chunk file in memory; a `Chunk`."""

    key: str
    fingerprint: str
    recipe: Recipe
    token_ids: TokenIds
    layers: int
    nbytes: int
    header: Header
    data: memoryview

    @classmethod
    def parse(cls, key: str, data: memoryview) -> FileChunk:
        """Check every byte of a chunk file.

        Raises
        ------
        DamagedChunkError
            If it is damaged, or not the file of ``key``.
        StoreMismatchError, InputError
            If a newer version of BlendKV wrote it.
        """
        header = parse_header(data, data.nbytes, key)
        for span in header.tensors.values():
            check_span(key, span, data[span.start : span.start + span.size])
        ids = ids_of(header, data)
        same_ids = token_ids_digest(ids) == header.token_ids_digest
        if not same_ids or chunk_key(header.fingerprint, header.recipe, ids) != key:
            raise DamagedChunkError(key, "mismatch: the key does not belong to this content")
        return cls(key, header.fingerprint, header.recipe, ids, header.layers, header.nbytes, header, data)
