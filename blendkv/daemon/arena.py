"""The daemon's host memory: one shared mapping, cut into slabs.

Clients map the whole of it once, for reading only, so that a chunk they are lent costs no mapping and, once its pages
were touched, no page fault. A slab is free again when nothing refers to it any more: neither the memory tier nor a
loan nor a write to disk. Its last word says how much of it is there, so that clients see a load's progress and need not
be told of it.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import threading
import weakref

import numpy as np

from blendkv.daemon.shm import new_memory

PAGE = 4096


WORD = 8
"""Bytes at the end of a slab in which its progress stands, little-endian."""


def held_bytes(size: int) -> int:
    """Bytes that a slab of ``size`` bytes takes, with its word: whole pages."""
    return -(-(size + WORD) // PAGE) * PAGE


class Slab:
    """``size`` bytes at ``offset`` of an arena, for as long as the object lives; ``held`` bytes of it are taken."""

    def __init__(self, arena: Arena, offset: int, size: int, held: int) -> None:
        self.offset = offset
        self.size = size
        self.held = held
        self._arena = arena

    def view(self) -> memoryview:
        """Its memory, to write or read. Keep the slab as long as the view."""
        return self._arena.view(self.offset, self.size)

    def tell(self, progress: int) -> None:
        """Let clients see a load's progress, after what it says is there has been written."""
        self._arena.view(self.offset + self.held - WORD, WORD)[:] = progress.to_bytes(WORD, "little")


class Arena:
    """``size`` bytes of shared memory; pages are taken from the system when they are first used.

    Raises
    ------
    StoreError
        If the system has no such memory.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-max(size, 1) // PAGE) * PAGE
        self._fd = new_memory("blendkv-arena", self.size)
        self._closer = weakref.finalize(self, os.close, self._fd)
        self._map = memoryview(mmap.mmap(self._fd, self.size))
        self._free: list[tuple[int, int]] = [(0, self.size)]  # (offset, bytes) by offset; neighbours are joined
        self._lock = threading.Lock()

    @property
    def free_bytes(self) -> int:
        """Bytes in no slab."""
        with self._lock:
            return sum(size for _, size in self._free)

    def reader_fd(self) -> int:
        """A descriptor that can be mapped for reading only; the caller's to close."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def view(self, offset: int, size: int) -> memoryview:
        """Bytes of the arena."""
        return self._map[offset : offset + size]

    def allocate(self, size: int) -> Slab | None:
        """A slab of ``size`` bytes in the smallest gap that holds it; None if no gap does."""
        held = held_bytes(size)
        with self._lock:
            gaps = [(gap, place) for place, (_, gap) in enumerate(self._free) if gap >= held]
            if not gaps:
                return None
            gap, place = min(gaps)
            offset = self._free[place][0]
            if gap == held:
                del self._free[place]
            else:
                self._free[place] = (offset + held, gap - held)
        slab = Slab(self, offset, size, held)
        weakref.finalize(slab, self._release, offset, held).atexit = False
        return slab

    def _release(self, offset: int, size: int) -> None:
        with self._lock:
            place = bisect.bisect(self._free, (offset, 0))
            if place < len(self._free) and offset + size == self._free[place][0]:
                size += self._free.pop(place)[1]
            if place and sum(self._free[place - 1]) == offset:
                place -= 1
                offset, before = self._free.pop(place)
                size += before
            self._free.insert(place, (offset, size))


class Window:
    """A client's mapping of an arena; takes over the descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._closer = weakref.finalize(self, os.close, fd)
        # Private, so that it counts as writable (torch wants that); a write would reach a copy of the page only.
        self._map = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_COPY))
        self._shared: memoryview | None = None

    def share(self) -> tuple[int, int]:
        """Map the arena a second time, shared; return the address and the bytes of that mapping."""
        mapped = mmap.mmap(self._fd, len(self._map), access=mmap.ACCESS_READ)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        # Counts as writable too; a write would end the process.
        array = (ctypes.c_ubyte * len(self._map)).from_address(address)
        array.mapped = mapped  # type: ignore[attr-defined]  # kept as long as a view of it
        self._shared = memoryview(array).cast("B")
        return address, len(self._map)

    def use_shared(self) -> None:
        """Cut all further views from the mapping of `share`."""
        assert self._shared is not None
        self._map = self._shared

    def view(self, offset: int, size: int) -> memoryview:
        """Bytes of the arena.

        Raises
        ------
        ValueError
            If it has no such bytes.
        """
        if offset + size > len(self._map):
            raise ValueError(f"bytes {offset} to {offset + size} of an arena of {len(self._map)}")
        return self._map[offset : offset + size]

    def progress(self, offset: int, size: int) -> memoryview:
        """The word of the slab of ``size`` bytes at ``offset``.

        Raises
        ------
        ValueError
            If the arena has no such bytes.
        """
        return self.view(offset + held_bytes(size) - WORD, WORD)
