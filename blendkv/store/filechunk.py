"""A chunk file that came from outside, checked to the last byte."""

from __future__ import annotations

from dataclasses import dataclass

from blendkv.store.chunkfile import Filed, Header, check_key, check_span, ids_of, parse_header
from blendkv.types import TokenIds


@dataclass(frozen=True)
class FileChunk(Filed):
    """A whole, verified chunk file in memory; a `Chunk`."""

    key: str
    token_ids: TokenIds
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
        check_key(key, header, ids)
        return cls(key, ids, header, data)
