"""A real redis-server of the test's own, on a free port and a Unix socket."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import redis

NAMES = ("redis-server", "valkey-server")
PATIENCE = 60.0
"""Seconds until it must answer, on a machine that has other things to do."""


def find() -> str:
    """The server's path. Without one the test is skipped, but under CI it fails."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        told = f"no Redis is installed (looked for {', '.join(NAMES)}): apt-get install redis-server"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(told)
    return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        return int(place.getsockname()[1])


class RedisServer:
    """Started at once; ``settings`` are redis.conf's, underscores for hyphens. Stop it in the end."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.port = free_port()
        self.socket = folder / "redis.sock"
        self._command = [find(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--unixsocket", str(self.socket), "--save", "", "--loglevel", "warning"]
        for name, value in settings.items():
            self._command += [f"--{name.replace('_', '-')}", str(value)]
        self._password = settings.get("requirepass")
        self._log = folder / "redis.log"
        self.start()

    @property
    def url(self) -> str:
        """Its URL over TCP."""
        return f"redis://127.0.0.1:{self.port}"

    def client(self) -> redis.Redis:
        """A plain client."""
        return redis.Redis(port=self.port, password=self._password)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        end = time.monotonic() + PATIENCE
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.RedisError:
                assert self.process.poll() is None, self._log.read_text()
                assert time.monotonic() < end, "no answer: " + self._log.read_text()
                time.sleep(0.02)

    def kill(self) -> None:
        """As a crash would."""
        self.process.kill()
        self.process.wait()

    def hang(self) -> None:
        """Stop it where it stands, with its connections open."""
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it, whatever state it is in."""
        self.kill()
