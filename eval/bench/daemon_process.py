"""`blendkv daemon` as a process of its own, as users start it, and what it holds of the machine's memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from blendkv.errors import BlendKVError

_KIB = 1024


class DaemonProcess:
    """A daemon of the store at ``root`` with ``memory`` bytes, not warmed; a context manager.

    Raises
    ------
    BlendKVError
        If it does not start; it has said why on standard error.
    """

    def __init__(self, root: Path, memory: int, disk: int | None = None) -> None:
        limits = ["--no-warm", "--memory", str(memory), *(() if disk is None else ("--disk", str(disk)))]
        program = "from blendkv.cli.main import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program, "daemon", "--store", str(root), *limits, "--json"],
            stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BlendKVError(f"the daemon ended with {self._process.wait()} before it served")
        self.chunks = int(json.loads(line)["rows"][0]["chunks"])
        """Chunks that it found in its store."""

    def resident(self) -> dict[str, int]:
        """Bytes of memory: ``own`` without the arena, ``arena`` of it, and ``peak``, the most that there ever was."""
        folder = Path("/proc") / str(self._process.pid)
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        total, peak = (int(status[name].split()[0]) * _KIB for name in ("VmRSS", "VmHWM"))
        arena, inside = 0, False
        for line in (folder / "smaps").read_text().splitlines():
            if "-" in line.split(" ", 1)[0]:  # the head of a mapping
                inside = "/memfd:blendkv-arena" in line
            elif inside and line.startswith("Rss:"):
                arena += int(line.split()[1]) * _KIB
        return {"own": total - arena, "arena": arena, "peak": peak}

    def close(self) -> None:
        """End it and wait.

        Raises
        ------
        BlendKVError
            If it did not end in order.
        """
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        code = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if code:
            raise BlendKVError(f"the daemon ended with {code}")

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
