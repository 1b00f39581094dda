"""Reads the layers of several chunk KVs ahead of the layer that is being computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from blendkv.errors import InputError
from blendkv.observe.tracing import carried, detail
from blendkv.store.base import ChunkReader, LoadingReader
from blendkv.store.codecs import EncodedReader

if TYPE_CHECKING:
    from blendkv.kernels.types import Stored


class LayerPrefetcher:
    """Hands out layer after layer of ``readers``; a thread reads up to ``depth`` layers ahead.

    The thread exists only if some reader loads from outside memory. Layers are asked for in order; any other order,
    and a second pass from layer 0, works and starts the read-ahead anew there. One consumer thread.

    Parameters
    ----------
    readers
        Chunk KVs with ``layers`` layers each.
    layers
        Number of layers.
    depth
        How many layers may wait, read, for the consumer; at least 1.

    Raises
    ------
    InputError
        If a reader has another number of layers, or ``depth`` is below 1.
    """

    def __init__(self, readers: Sequence[ChunkReader], layers: int, depth: int = 2) -> None:
        if depth < 1:
            raise InputError(f"prefetch depth {depth} is not allowed; give 1 or more")
        for reader in readers:
            if reader.layers != layers:
                raise InputError(
                    f"chunk KV {reader.key[:12]} has {reader.layers} layers and the model {layers}; "
                    "use chunk KVs of this model"
                )
        self._sources = [r.encoded if isinstance(r, EncodedReader) else r.layer for r in readers]
        self._loading = [reader for reader in readers if isinstance(reader, LoadingReader)]
        self._read_before = sum(reader.bytes_read for reader in self._loading)
        self._layers = layers
        self._depth = depth
        self._ready: dict[int, list[tuple[Stored, Stored]] | Exception] = {}
        self._next = 0  # the layer to read next
        self._consumed = -1  # the last layer handed out
        self._pass = 0  # tells a layer read for an earlier order from one of this
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.wait_seconds = 0.0
        """Seconds that the consumer waited for layers."""
        if self._loading:
            self._thread = threading.Thread(target=carried(self._run), name="blendkv-prefetch", daemon=True)
            self._thread.start()

    @property
    def bytes_loaded(self) -> int:
        """Bytes read from outside memory so far, those read ahead included."""
        return sum(reader.bytes_read for reader in self._loading) - self._read_before

    def layer(self, index: int) -> list[tuple[Stored, Stored]]:
        """K and V of layer ``index`` of every chunk, in the order of the readers; of an `EncodedReader` as stored.

        Raises
        ------
        DamagedChunkError
            If a chunk's layer cannot be read; other errors of a reader surface here as well.
        IndexError
            If there is no such layer.
        """
        if not 0 <= index < self._layers:
            raise IndexError(f"layer {index} of {self._layers}")
        if self._closed:
            raise InputError("the prefetcher is closed; make a new one")
        if self._thread is None:
            return self._read(index)
        start = time.perf_counter()
        with self._changed:
            if index not in self._ready and index != self._next:
                self._restart(index)
            for passed in [ready for ready in self._ready if ready < index]:
                del self._ready[passed]
            self._consumed = index - 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: index in self._ready)
            found = self._ready.pop(index)
            self._consumed = index
            self._changed.notify_all()
        self.wait_seconds += time.perf_counter() - start
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """End the thread; returns when it is gone."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> LayerPrefetcher:
        return self

    def __exit__(self, kind: type[Exception] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _restart(self, index: int) -> None:
        self._ready.clear()
        self._next = index
        self._pass += 1

    def _read(self, index: int) -> list[tuple[Stored, Stored]]:
        return [source(index) for source in self._sources]

    def _due(self) -> bool:
        return self._next < self._layers and self._next <= self._consumed + self._depth

    def _run(self) -> None:
        tiers = sorted({reader.tier for reader in self._loading})
        while self._wait(self._due):
            with detail("load", tiers=tiers, layers=self._layers) as told:
                while self._wait(lambda: self._due() or self._next == self._layers) and self._next < self._layers:
                    self._read_ahead()
                told.set(bytes=self.bytes_loaded)

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for it; False when the prefetcher is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or condition())
            return not self._closed

    def _read_ahead(self) -> None:
        with self._changed:
            index, current = self._next, self._pass
        found = self._load(index)
        with self._changed:
            if current == self._pass:
                self._ready[index] = found
                # Nothing behind a damaged layer is worth reading, until it is asked for.
                self._next = self._layers if isinstance(found, Exception) else index + 1
                self._changed.notify_all()

    def _load(self, index: int) -> list[tuple[Stored, Stored]] | Exception:
        try:
            for ahead in range(index, min(index + 2, self._layers)):
                for reader in self._loading:
                    reader.readahead(ahead)
            return self._read(index)
        except Exception as error:  # surfaces where the layer is asked for
            return error
