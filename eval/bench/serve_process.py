"""`blendkv serve` as a process of its own, as users start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType

import httpx
from prometheus_client.parser import text_string_to_metric_families

from blendkv.errors import BlendKVError

_TAIL = 2000
_PATIENCE = 240.0
"""Seconds in which a server must be ready: a model is loaded."""


class ServeProcess:
    """A server of the store at ``root`` with the embedded engine; a context manager.

    Parameters
    ----------
    root
        The store.
    model
        Folder, hub id, or ``demo``.
    options
        More of `blendkv serve`.
    threads
        Of torch.

    Raises
    ------
    BlendKVError
        If it does not start, with its last words.
    """

    def __init__(self, root: Path, model: str, options: tuple[str, ...], threads: int = 1) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        program = "from blendkv.cli.main import main; main()"
        fixed = ("serve", "--store", str(root), "--model", model, "--port", "0", "--json", "--threads", str(threads))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program, *fixed, *options],
            stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        watchdog = threading.Timer(_PATIENCE, self._process.kill)
        watchdog.start()
        try:
            row = json.loads(self._ready())["rows"][0]
        except BaseException:
            self._end(signal.SIGKILL)
            raise
        finally:
            watchdog.cancel()
        self.url: str = row["url"]
        """Where it listens."""
        self.model: str = row["models"][0]
        """The model's name in requests."""

    def _ready(self) -> str:
        """The object that it prints when it serves."""
        assert self._process.stdout is not None
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            line = self._process.stdout.readline()
            if not line:
                code = self._process.wait()
                raise BlendKVError(f"blendkv serve ended with {code} before it served: {self.last_words()}")
            lines.append(line)
        return "".join(lines)

    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _TAIL))
        return self._log.read().decode("utf-8", "replace").strip()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels; 0 if there are none."""
        page = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples if s.name == name]
        return float(sum(s.value for s in samples if labels.items() <= s.labels.items()))

    def close(self) -> None:
        """End it and wait.

        Raises
        ------
        BlendKVError
            If it did not end in order.
        """
        words = self.last_words()
        code = self._end(signal.SIGTERM)
        if code:
            raise BlendKVError(f"blendkv serve ended with {code}: {words}")

    def _end(self, how: signal.Signals) -> int:
        if self._process.poll() is None:
            self._process.send_signal(how)
        try:
            code = self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
        return code

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # what went wrong is on its way already
            self._end(signal.SIGTERM)
