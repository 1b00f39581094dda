"""A chunk file in shared memory, whole or being filled layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from blendkv.daemon.arena import Slab
from blendkv.daemon.shm import Parcel
from blendkv.errors import DamagedChunkError, InputError
from blendkv.store.chunkfile import Filed, Header, copy_bytes, header_bytes
from blendkv.store.filechunk import FileChunk
from blendkv.types import TokenIds


class LayerSource(Protocol):
    """Where the layers of a chunk file come from."""

    header: Header

    def fill_head(self, file: memoryview) -> None:
        """Write what stands before the layers to its place in ``file``."""

    def fill(self, index: int, file: memoryview) -> None:
        """Write the bytes of layer ``index`` to their place in ``file``."""

    def close(self) -> None:
        """No more is wanted."""


class Image(Filed):
    """The chunk file under ``key``: in a slab of the arena, or still in the parcel in which it came.

    ``ready`` layers of it are there, counted from the first.
    """

    def __init__(self, key: str, header: Header, token_ids: TokenIds, place: Slab | Parcel, ready: int) -> None:
        self.key = key
        self.header = header
        self.token_ids = token_ids
        self.place = place
        self.ready = ready
        self.failure: str | None = None
        self.turned_away = False
        """Whether the memory's policy was asked when it came, and has refused it."""
        self._calls: list[tuple[int, Callable[[], None]]] = []
        self._lock = threading.Lock()
        if isinstance(place, Slab):
            place.tell(ready)

    @property
    def whole(self) -> bool:
        """Whether all layers are there."""
        return self.ready == self.layers

    @classmethod
    def received(cls, key: str, place: Slab | Parcel) -> Image:
        """The image that a client has sent, in memory that it cannot change; every byte is checked.

        Raises
        ------
        InputError
            If it is not a whole chunk file of that key.
        """
        with refused(key):
            chunk = FileChunk.parse(key, place.view())
        return cls(key, chunk.header, chunk.token_ids, place, chunk.layers)

    def moved(self, slab: Slab) -> Image:
        """A copy in the arena."""
        copy_bytes(slab.view(), self.place.view())
        return Image(self.key, self.header, self.token_ids, slab, self.ready)

    def file(self) -> memoryview:
        """The bytes of the whole file; keep the image as long as the view."""
        return self.place.view()

    def when(self, layer: int, call: Callable[[], None]) -> None:
        """Call once ``layer`` is there, or will not come: at once if that is so already, else in a loading thread."""
        with self._lock:
            waits = layer >= self.ready and self.failure is None
            if waits:
                self._calls.append((layer, call))
        if not waits:
            call()

    def advance(self) -> None:
        """One layer more is there."""
        self._change(ready=self.ready + 1)

    def fail(self, reason: str) -> None:
        """The rest will not come."""
        self._change(ready=self.ready, failure=reason)

    def _change(self, ready: int, failure: str | None = None) -> None:
        with self._lock:
            self.ready, self.failure = ready, failure
            if isinstance(self.place, Slab):
                self.place.tell(ready)
            due = [call for layer, call in self._calls if layer < ready or failure is not None]
            self._calls = [(layer, call) for layer, call in self._calls if layer >= ready and failure is None]
        for call in due:
            call()


@contextmanager
def refused(key: str) -> Iterator[None]:
    """Damage in what a client has sent is the client's fault: an `InputError`."""
    try:
        yield
    except (DamagedChunkError, ValueError) as error:
        reason = error.reason if isinstance(error, DamagedChunkError) else error
        raise InputError(f"what was put under {key[:12]} is not the file of that chunk ({reason})") from error


def head_of(data: memoryview, size: int, key: str) -> bytes:
    """The length and the header that lead a file: equal bytes mean an equal header."""
    return bytes(data[: header_bytes(data[:8], size, key)])
