"""Durable files: what the standard library leaves to its caller."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"


def make_directory(path: Path) -> None:
    """Create a directory and its parents, durably."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of ``data``; ``os.write`` alone may stop short."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.write(fd, view[done:])


@contextmanager
def temporary_file(target: Path) -> Iterator[tuple[int, Path]]:
    """A new file beside ``target``, deleted at the end unless it was renamed.

    Its lock says that the writer lives (a kill lets go of it), so that a sweep can tell a leftover. The sweep may come
    between creation and lock: then the name is gone when the lock is ours, and we begin again.
    """
    while True:
        path = target.with_name(f".{target.stem}.{os.getpid()}.{time.monotonic_ns()}{TEMPORARY_SUFFIX}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                yield fd, path
                return
        finally:
            with suppress(FileNotFoundError):
                path.unlink()
            os.close(fd)


def delete_leftover(path: Path) -> bool:
    """Delete a temporary file unless its writer lives, and so holds its lock; return whether it was deleted."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except (BlockingIOError, FileNotFoundError):  # the writer lives, or has just finished
        return False
    finally:
        os.close(fd)
    return True
