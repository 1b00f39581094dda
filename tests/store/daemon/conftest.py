from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from daemon_process import eventually as wait

from blendkv.daemon.client import DaemonStore
from blendkv.daemon.server import Daemon

PATIENT = 20.0
"""Deadline of clients in tests that are about something else: a loaded machine must not look like a dead daemon."""


@pytest.fixture
def start_process() -> Iterator[Callable[..., DaemonProcess]]:
    with contextlib.ExitStack() as stack:

        def start(root: Path, *options: str) -> DaemonProcess:
            process = DaemonProcess(root, *options)
            stack.callback(process.close)
            return process

        yield start


@contextlib.contextmanager
def serving(root: Path, memory_bytes: int, **options: object) -> Iterator[Daemon]:
    with Daemon(root, memory_bytes, **options) as daemon:
        thread = threading.Thread(target=daemon.serve)
        thread.start()
        try:
            yield daemon
        finally:
            daemon.stop()
            thread.join()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts a daemon in this process; it ends with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda memory_bytes=1 << 24, **options: stack.enter_context(
            serving(tmp_path / "s", memory_bytes, **options)
        )


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[..., DaemonStore]]:
    """Opens a client's store; it is closed with the test, before the daemon ends."""
    with contextlib.ExitStack() as stack:
        yield lambda deadline=PATIENT: stack.enter_context(DaemonStore(tmp_path / "s", deadline))


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """Waits until something is so; fails after a time that only a fault takes."""
    return wait
