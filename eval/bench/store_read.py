"""Ways to read a chunk file, with the page cache cold and warm: what the store uses, and what it does not.

Each way reads every tensor of every file into the same memory, whose pages are there. ``checked`` is what the store
does: ``preadv``, then each tensor's checksum.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from blendkv.errors import DamagedChunkError
from blendkv.eval.bench.rows import Rows
from blendkv.eval.bench.store_get import WRONG, GetSettings, make_chunks, seconds_of
from blendkv.store.chunkfile import Header, read_header, read_span
from blendkv.store.tensors import encode_chunk

_BLOCK = 4096
_MOST_ROUNDS = 3  # cold reads are slow
_DROPS = 20


@dataclass(frozen=True)
class _File:
    path: Path
    header: Header
    content: bytes


def measure_read(settings: GetSettings, folder: Path, rows: Rows, tell: Callable[[str], None]) -> None:
    """Rows of every way to read, cold and warm, beside ``preadv``."""
    shape = settings.shapes[0]
    tell(f"ways to read a file of {shape[1]} layers of {shape[0]}")
    files = _write(folder, settings)
    size = max(len(file.content) for file in files)
    memory = memoryview(mmap.mmap(-1, -(-size // _BLOCK) * _BLOCK))  # at a page's start, as O_DIRECT wants it
    memory[:] = bytes(len(memory))
    total = sum(len(file.content) for file in files)
    for state in ("cold", "warm"):
        seconds: dict[str, list[float]] = {name: [] for name in _WAYS}
        wrong: dict[str, str] = {}
        for _ in range(min(settings.rounds, _MOST_ROUNDS)):
            for name, read in _WAYS.items():
                spent, problem = _round(files, read, memory, state == "cold")
                seconds[name].append(spent)
                if problem is not None:
                    wrong[name] = problem
        base = statistics.median(seconds["preadv"])
        for name, spans in seconds.items():
            spent = statistics.median(spans)
            rows.add(
                f"disk_read_{name}_{state}, {shape[0]}", total / spent / 1e9, "GB/s", f"preadv, {state}", base / spent,
                wrong=wrong.get(name),
            )  # fmt: skip


def cached_bytes(path: Path) -> int:
    """Bytes of a file that the page cache holds, in whole pages, by ``mincore``: to read them would bring others.

    Raises
    ------
    OSError
        If the system does not say so.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        asked = ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), ctypes.c_void_p(pages.ctypes.data)
        if libc.mincore(*asked):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        return int((pages & 1).sum()) * mmap.PAGESIZE


def drop_cached(path: Path) -> int:
    """Let the page cache forget a file whose content is on the device; return how many bytes it still holds.

    Pages that the kernel is about to put on a list are passed over, so it is asked several times.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for _ in range(_DROPS):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            left = cached_bytes(path)
            if not left:
                break
            time.sleep(0.02)
    finally:
        os.close(fd)
    return left


def _warmed(path: Path) -> int:
    """Bytes of a file that the page cache holds once it was read."""
    path.read_bytes()
    return cached_bytes(path)


def _write(folder: Path, settings: GetSettings) -> list[_File]:
    files = []
    for number, kv in enumerate(make_chunks(settings.shapes[0], settings)):
        path, content = folder / f"{number}.safetensors", bytes(encode_chunk(kv))
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with path.open("rb") as file:
            files.append(_File(path, read_header(file.fileno(), kv.key), content))
    return files


def _round(
    files: Sequence[_File], read: Callable[[_File, memoryview], None], memory: memoryview, cold: bool
) -> tuple[float, str | None]:
    """Seconds of reading all files, and why they are not to be believed."""
    seconds, problem = 0.0, None
    for file in files:
        cached = drop_cached(file.path) if cold else _warmed(file.path)
        if (cold and cached) or (not cold and cached < len(file.content)):
            problem = f"the page cache held {cached} of {len(file.content)} bytes"
        memory[:] = bytes(len(memory))
        try:
            seconds += seconds_of(lambda file=file: read(file, memory))  # type: ignore[misc]
        except (OSError, DamagedChunkError) as error:
            problem = str(error)
            continue
        if any(
            memory[span.start : span.start + span.size] != file.content[span.start : span.start + span.size]
            for span in file.header.tensors.values()
        ):
            problem = WRONG
    return seconds, problem


def _preadv(file: _File, memory: memoryview) -> None:
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for span in file.header.tensors.values():
            _read_at(fd, memory, span.start, span.start + span.size, len(file.content))
    finally:
        os.close(fd)


def _checked(file: _File, memory: memoryview) -> None:
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for span in file.header.tensors.values():
            read_span(fd, file.path.stem, span, memory[span.start : span.start + span.size])
    finally:
        os.close(fd)


def _mapped(file: _File, memory: memoryview) -> None:
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            for span in file.header.tensors.values():
                memory[span.start : span.start + span.size] = view[span.start : span.start + span.size]
    finally:
        os.close(fd)


def _direct(file: _File, memory: memoryview) -> None:
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:
        for span in file.header.tensors.values():
            start = span.start // _BLOCK * _BLOCK
            stop = min(-(-(span.start + span.size) // _BLOCK) * _BLOCK, len(memory))
            _read_at(fd, memory, start, stop, len(file.content))
    finally:
        os.close(fd)


def _read_at(fd: int, memory: memoryview, start: int, stop: int, end: int) -> None:
    """Read up to ``stop``, or the file's ``end``."""
    while start < min(stop, end):
        start += os.preadv(fd, [memory[start:stop]], start)


_WAYS: dict[str, Callable[[_File, memoryview], None]] = {
    "preadv": _preadv,
    "checked": _checked,
    "mmap": _mapped,
    "direct": _direct,
}
