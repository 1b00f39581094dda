"""The arena: slabs never overlap, memory comes back, and neither a reader nor a writer can do harm."""

from __future__ import annotations

import mmap
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.daemon.arena import PAGE, WORD, Arena, Window
from blendkv.daemon.shm import Parcel
from blendkv.errors import StoreError

STEPS = st.lists(
    st.one_of(st.tuples(st.just("take"), st.integers(1, 5 * PAGE)), st.tuples(st.just("free"), st.integers(0, 50))),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_slabs_never_overlap_and_all_comes_back(steps):
    arena, slabs = Arena(16 * PAGE), []
    window = Window(arena.reader_fd())
    for step, value in steps:
        if step == "take":
            before = arena.free_bytes
            slab = arena.allocate(value)
            if slab is None:
                assert all(gap < value + WORD for _, gap in arena._free)
                continue
            assert before - arena.free_bytes == slab.held >= value + WORD > slab.held - PAGE
            mark = value % 251
            slab.view()[:] = bytes([mark]) * value
            slab.tell(value)
            slabs.append((slab, mark))
        elif slabs:
            del slabs[value % len(slabs)]
            slab = None
        for kept, mark in slabs:
            assert bytes(kept.view()) == bytes([mark]) * kept.size
            assert int.from_bytes(window.progress(kept.offset, kept.size), "little") == kept.size
    slab = kept = None
    slabs.clear()
    assert arena._free == [(0, arena.size)]


def test_the_smallest_gap_that_holds_is_taken():
    arena = Arena(10 * PAGE)
    a, b, c, d = (arena.allocate(n * PAGE - WORD) for n in (3, 1, 2, 1))
    places = {name: slab.offset for name, slab in (("a", a), ("c", c))}
    del a, c
    assert arena.allocate(2 * PAGE - WORD).offset == places["c"]
    assert arena.allocate(3 * PAGE - WORD + 1) is None
    assert arena.allocate(2 * PAGE - WORD + 1).offset == places["a"]
    assert (b.held, d.held) == (PAGE, PAGE)


def test_a_window_sees_what_is_written_later_and_cannot_write():
    arena = Arena(3 * PAGE)
    window = Window(arena.reader_fd())
    slab = arena.allocate(100)
    view = window.view(slab.offset, slab.size)
    assert bytes(view) == bytes(100)
    slab.view()[:] = b"x" * 100
    assert bytes(view) == b"x" * 100
    other = window.view(PAGE, PAGE)
    other[:5] = b"mine!"  # a private copy of the page
    assert bytes(arena.view(PAGE, 5)) == bytes(5)
    with pytest.raises(ValueError, match="bytes 8192 to 12289 of an arena of 12288"):
        window.view(2 * PAGE, PAGE + 1)
    fd = arena.reader_fd()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, arena.size)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(fd, 1)
    os.close(fd)


def test_a_parcel_is_taken_only_sealed(tmp_path):
    parcel = Parcel.create(10)
    with pytest.raises(StoreError, match="not sealed"):
        Parcel.received(os.dup(parcel.fd))
    view = parcel.writable()
    view[:] = b"0123456789"
    with pytest.raises(StoreError, match="while it is mapped for writing"):
        parcel.seal()
    view.release()
    parcel.seal()
    received = Parcel.received(os.dup(parcel.fd))
    assert bytes(received.view()) == b"0123456789"
    with pytest.raises(PermissionError):
        mmap.mmap(received.fd, 10)
    with (tmp_path / "x").open("wb") as file, pytest.raises(StoreError, match=r"not shared memory|not sealed"):
        Parcel.received(os.dup(file.fileno()))
    before = len(os.listdir("/proc/self/fd"))
    del parcel, received
    assert len(os.listdir("/proc/self/fd")) == before - 2
