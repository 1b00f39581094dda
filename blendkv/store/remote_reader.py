"""Reads a chunk of a remote tier layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from blendkv.errors import DamagedChunkError, TierUnavailableError, UnavailableChunkError
from blendkv.store.base import Layer
from blendkv.store.chunkfile import Filed, check_key, check_span, ids_of, parse_header
from blendkv.store.guard import GuardedTier
from blendkv.store.remote import Head
from blendkv.types import TokenIds

MOST_AT_ONCE = 8
"""Layers read in one round trip at most: one at first, so that the first is soon there, then more and more."""

Finder = Callable[[GuardedTier], tuple[GuardedTier, Head] | None]


class RemoteReader(Filed):
    """A `LoadingReader` over the chunk ``key`` in ``tier``; every tensor is verified as it is read.

    Where the tier fails or has lost a layer, ``another`` names the next one that has the chunk, and reading goes on
    there: each layer comes from the first tier that gives it.

    Raises
    ------
    DamagedChunkError
        If the head is not that of a chunk file of this key.
    """

    def __init__(self, key: str, tier: GuardedTier, head: Head, another: Finder) -> None:
        self.key = key
        self.header = parse_header(head.data, head.file_bytes, key)
        if not self.header.in_order or len(head.layers) != self.header.layers:
            raise DamagedChunkError(key, "header: its layers do not lie in order")
        self.token_ids: TokenIds = ids_of(self.header, head.data)
        """Token ids, int32 ``[tokens]``."""
        check_key(key, self.header, self.token_ids)
        self.bytes_read = 0
        self._tier = tier
        self._head = head
        self._another = another
        self._ahead: dict[int, memoryview] = {}
        self._lock = threading.Lock()

    @property
    def tier(self) -> str:
        """Name of the tier that is read from."""
        return self._tier.name

    def layer(self, index: int) -> Layer:
        """K and V of layer ``index``, each ``[tokens, kv_heads, head_dim]``.

        Raises
        ------
        UnavailableChunkError
            If no tier gives it now.
        DamagedChunkError
            If what is stored is damaged.
        IndexError
            If there is no such layer.
        """
        from blendkv.store.tensors import decode_layer

        spans, (start, _) = self.header.layer(index), self.header.layer_range(index)
        data = self._take(index)
        parts = {p: (span, data[span.start - start : span.start - start + span.size]) for p, span in spans.items()}
        return decode_layer(self.recipe, parts)

    def fill_head(self, file: memoryview) -> None:
        """Write what stands before the layers to its place in ``file``, the memory of the whole file."""
        file[: self._head.data.nbytes] = self._head.data

    def fill(self, index: int, file: memoryview) -> None:
        """Read the bytes of layer ``index`` to their place in ``file``; raises as `layer`."""
        start, stop = self.header.layer_range(index)
        file[start:stop] = self._take(index)

    def readahead(self, index: int) -> None:
        """Nothing to do: layers are read several at a time."""

    def close(self) -> None:
        """Forget what was read ahead."""
        self._ahead.clear()

    def _take(self, index: int) -> memoryview:
        with self._lock:
            if index not in self._ahead:
                count = min(index + 1, MOST_AT_ONCE, self.layers - index)
                for number, data in enumerate(self._fetch(index, count), index):
                    self._ahead[number] = data
            return self._ahead.pop(index)

    def _fetch(self, first: int, count: int) -> list[memoryview]:
        while True:
            into = [np.empty(size, dtype=np.uint8).data for size in self._head.layers[first : first + count]]
            try:
                self._tier.fetch(self._head, first, into)
                for number, data in enumerate(into, first):
                    self._verify(number, data)
            except (TierUnavailableError, DamagedChunkError) as error:
                self._go_elsewhere(error)
                continue
            self.bytes_read += sum(data.nbytes for data in into)
            return into

    def _verify(self, index: int, data: memoryview) -> None:
        start, _ = self.header.layer_range(index)
        for span in self.header.layer(index).values():
            check_span(self.key, span, data[span.start - start : span.start - start + span.size])

    def _go_elsewhere(self, error: TierUnavailableError | DamagedChunkError) -> None:
        found = self._another(self._tier)
        if found is None or found[1].layers != self._head.layers or found[1].data != self._head.data:
            if isinstance(error, TierUnavailableError) or error.reason.startswith("missing"):
                raise UnavailableChunkError(self.key, str(error)) from error
            raise error
        self._tier, self._head = found
