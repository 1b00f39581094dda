"""`blendkv daemon` in a process of its own, to be killed, stopped and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MAIN = "from blendkv.cli.main import main; main()"
STUCK_DISK = """
import time
from blendkv.store.filereader import DiskReader
fill = DiskReader.fill
def stuck(self, index, file):
    if index >= {layer}:
        time.sleep(600)
    fill(self, index, file)
DiskReader.fill = stuck
"""
"""Put before `MAIN`: layers from ``layer`` on never come from the disk."""


class DaemonProcess:
    """`blendkv daemon` as users start it, but not warmed; ``before`` is run in its process first."""

    def __init__(self, root: Path, memory: str = "64MB", *options: str, before: str = "") -> None:
        self.root = root
        command = [sys.executable, "-c", before + MAIN, "daemon", "--store", str(root), "--memory", memory, "--json"]
        command.append("--no-warm")  # else what is in memory when would be a matter of luck; a later --warm counts
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        self.ready = json.loads(self.process.stdout.readline())

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self, number: int = signal.SIGKILL) -> int:
        os.kill(self.pid, number)
        while number == signal.SIGSTOP and Path(f"/proc/{self.pid}/stat").read_text().split(")")[1].split()[0] != "T":
            time.sleep(0.001)
        if number not in (signal.SIGSTOP, signal.SIGCONT):
            code = self.process.wait(60)
            self.process.stdout.close()
            return code
        return 0

    def close(self) -> None:
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGCONT)
            assert self.kill(signal.SIGTERM) == 0

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


def eventually(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until something is so; fail after a time that only a fault takes."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)
