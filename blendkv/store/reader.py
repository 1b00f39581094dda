"""The reader that a store hands out for a chunk outside memory: it keeps what it read and reports what it found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from blendkv.errors import DamagedChunkError
from blendkv.store.base import ClosableReader, Layer
from blendkv.types import ChunkKV, Recipe, TokenIds


class KeepingReader:
    """Reads every layer from its tier once at most, if ``keep``; then hands the whole chunk to ``on_complete``.

    What it keeps comes on top of the memory tier's bytes until the reader is dropped or the chunk is promoted.
    Without ``keep`` (the chunk is too large for the memory tier) each call reads again. ``on_layer`` hears how many
    seconds the tier took for a layer.
    """

    def __init__(
        self,
        inner: ClosableReader,
        keep: bool,
        on_complete: Callable[[ChunkKV], None],
        on_damage: Callable[[DamagedChunkError], None],
        on_layer: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._inner = inner
        self._keep = keep
        self._on_complete = on_complete
        self._on_damage = on_damage
        self._on_layer = on_layer
        self._kept: dict[int, Layer] = {}
        self._damage: DamagedChunkError | None = None
        self._lock = threading.Lock()

    @property
    def key(self) -> str:
        """The chunk key."""
        return self._inner.key

    @property
    def token_ids(self) -> TokenIds:
        """Token ids, int32 ``[tokens]``."""
        return self._inner.token_ids

    @property
    def recipe(self) -> Recipe:
        """How the chunk KV was computed."""
        return self._inner.recipe

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
        """Bytes of all K and V."""
        return self._inner.nbytes

    @property
    def tier(self) -> str:
        """Where the layers come from."""
        return self._inner.tier

    @property
    def bytes_read(self) -> int:
        """Bytes read from there so far."""
        return self._inner.bytes_read

    def layer(self, index: int) -> Layer:
        """K and V of layer ``index``, each ``[tokens, kv_heads, head_dim]``.

        Raises
        ------
        DamagedChunkError
            If the bytes are missing, altered or unreadable; the store has dropped the chunk by then.
        IndexError
            If there is no such layer.
        """
        with self._lock:  # held while reading: a second thread that wants the layer takes what the first one read
            if index in self._kept:
                return self._kept[index]
            if self._damage is not None:  # reported once: by now the store may hold a good chunk under this key
                raise self._damage
            begun = time.perf_counter()
            try:
                pair = self._inner.layer(index)
            except DamagedChunkError as error:
                self._damage = error
                self._on_damage(error)
                raise
            self._on_layer(time.perf_counter() - begun)
            if self._keep:
                self._kept[index] = pair
                if len(self._kept) == self.layers:
                    self._complete()
            return pair

    def readahead(self, index: int) -> None:
        """Ask the kernel to fetch layer ``index``, unless it is kept already."""
        if index not in self._kept:
            self._inner.readahead(index)

    def _complete(self) -> None:
        self._inner.close()
        k, v = zip(*(self._kept[index] for index in range(self.layers)), strict=True)
        self._on_complete(ChunkKV(self.fingerprint, self.recipe, self.token_ids, k, v))
