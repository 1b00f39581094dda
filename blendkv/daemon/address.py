"""Where a daemon listens: a socket in the store's folder, which one daemon at a time may own."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from blendkv.errors import InputError, StoreError
from blendkv.store.opening import DAEMON_NAMES

SOCKET_NAME, LOCK_NAME = DAEMON_NAMES


def socket_path(store: Path) -> Path:
    """The socket of the daemon of a store."""
    return store / SOCKET_NAME


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of ``path`` that fits into a socket's address (107 bytes), by way of its open folder."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


@contextmanager
def ownership(store: Path) -> Iterator[None]:
    """Be the store's only daemon; a kill gives it up.

    Raises
    ------
    InputError
        If another one runs.
    """
    fd = os.open(store / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"a daemon runs already for the store {store}; stop it first") from error
        yield
    finally:
        os.close(fd)


def listen(store: Path, mode: int = 0o600) -> socket.socket:
    """A listening socket in the store's folder, with the file mode ``mode``. Only for its owner (`ownership`).

    Raises
    ------
    StoreError
        If it cannot be made.
    """
    path = socket_path(store)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with suppress(FileNotFoundError):
            path.unlink()  # of a daemon that was killed
        before = os.umask(0o777 & ~mode)
        try:
            with _short(path) as name:
                server.bind(name)
        finally:
            os.umask(before)
        server.listen(64)
    except OSError as error:
        server.close()
        raise StoreError(f"cannot listen on {path}: {error.strerror}; check the folder's rights") from error
    return server


def connect(store: Path, timeout: float) -> socket.socket:
    """A socket connected to the daemon of a store.

    Raises
    ------
    OSError
        If none listens.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        client.settimeout(timeout)
        with _short(socket_path(store)) as name:
            client.connect(name)
    except BaseException:
        client.close()
        raise
    return client


def listens(store: Path) -> bool:
    """Whether a daemon of the store listens, even one that does not answer; the socket of a killed one refuses."""
    try:
        connect(store, 0.0).close()
    except BlockingIOError:  # so many wait already
        return True
    except OSError:
        return False
    return True


def peer(sock: socket.socket) -> tuple[int, int]:
    """(process id, user id) of the other end, from the kernel."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def send_timeout(sock: socket.socket, seconds: float) -> None:
    """Let a send fail that the other end does not take for so long; receiving waits as before."""
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
