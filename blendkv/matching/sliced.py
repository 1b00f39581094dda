"""A run of tokens of a stored chunk KV, as a chunk KV of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from blendkv.errors import InputError
from blendkv.store.base import ChunkReader, Layer, LoadingReader
from blendkv.types import Recipe, TokenIds, chunk_key


class SlicedReader:
    """Tokens ``start .. stop - 1`` of another reader's chunk; a `ChunkReader`.

    It is a `LoadingReader` exactly if the other is one. Layers are views of the other's tensors. The recipe's prefix
    is the other's and then the tokens left out in front: those are what the KV was computed behind.

    Raises
    ------
    InputError
        If the run is empty or not within the chunk.
    """

    def __new__(cls, reader: ChunkReader, start: int, stop: int) -> SlicedReader:
        """Make a slice that loads, or one that does not: a prefetcher tells readers apart by their attributes."""
        return object.__new__(_LoadingSlice if isinstance(reader, LoadingReader) else SlicedReader)

    def __init__(self, reader: ChunkReader, start: int, stop: int) -> None:
        whole = len(reader.token_ids)
        if not 0 <= start < stop <= whole:
            raise InputError(
                f"tokens {start} to {stop} of chunk KV {reader.key[:12]} are asked for; it has {whole}: "
                "give 0 <= start < stop <= tokens"
            )
        self._inner: Any = reader
        self._span = slice(start, stop)

    @cached_property
    def key(self) -> str:
        """The chunk key that a chunk KV of these tokens behind this recipe's prefix has."""
        return chunk_key(self.fingerprint, self.recipe, self.token_ids)

    @property
    def token_ids(self) -> TokenIds:
        """Token ids, int32 ``[stop - start]``."""
        return self._inner.token_ids[self._span]

    @cached_property
    def recipe(self) -> Recipe:
        """How it was computed: behind the other's prefix and the tokens left out in front."""
        whole: Recipe = self._inner.recipe
        dropped = tuple(int(t) for t in self._inner.token_ids[: self._span.start])
        return replace(whole, prefix=whole.prefix + dropped)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that computed it."""
        return self._inner.fingerprint

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self._inner.layers

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of these tokens."""
        return self._inner.nbytes * (self._span.stop - self._span.start) // len(self._inner.token_ids)

    def layer(self, index: int) -> Layer:
        """K and V of layer ``index``, each ``[stop - start, kv_heads, head_dim]``.

        Raises
        ------
        DamagedChunkError
            If the stored bytes are damaged; it names the stored chunk.
        IndexError
            If there is no such layer.
        """
        k, v = self._inner.layer(index)
        return k[self._span], v[self._span]


class _LoadingSlice(SlicedReader):
    """A slice of a reader that loads from a slower place than memory: whole layers are read."""

    @property
    def tier(self) -> str:
        """Where the layers come from."""
        return self._inner.tier

    @property
    def bytes_read(self) -> int:
        """Bytes that the other reader has read so far."""
        return self._inner.bytes_read

    def readahead(self, index: int) -> None:
        """Start fetching layer ``index``."""
        self._inner.readahead(index)
