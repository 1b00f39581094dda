"""A process that measures: commands and answers are lines of JSON on its standard input and output.

An engine that is measured has a process of its own, so that what this one has imported and set does not touch it, and
engines that are compared take turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from blendkv.errors import BlendKVError, InputError

_TAIL = 2000


class MeasuringProcess:
    """Runs ``python -m module`` and calls its operations; a context manager.

    Parameters
    ----------
    module
        A module that calls `serve_operations`.
    environment
        Variables added to this process's own.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._module = module
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],  # -P: a folder named like a package may lie in the current one
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip

    def call(self, operation: str, **values: Any) -> Any:
        """Run an operation there and return its result.

        Raises
        ------
        InputError
            If the operation raised one.
        BlendKVError
            If it failed otherwise, or if the process died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"operation": operation, **values}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BlendKVError(
                f"{self._module} ended with {self._process.wait()} while it ran {operation!r}; its last words: "
                f"{self._last_words()}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise (InputError if answer["input"] else BlendKVError)(answer["error"])
        return answer["result"]

    def _last_words(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _TAIL))
        return self._log.read().decode("utf-8", "replace").strip()

    def close(self) -> None:
        """End the process: it closes what it has open when its input ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> MeasuringProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve_operations(operations: Mapping[str, Callable[..., Any]]) -> None:
    """Answer calls until the input ends. Whatever else writes to standard output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        values = json.loads(line)
        try:
            answer = {"result": operations[values.pop("operation")](**values)}
        except Exception as error:  # the other process raises it
            text = str(error) if isinstance(error, BlendKVError) else f"{type(error).__name__}: {error}"
            answer = {"error": text, "input": isinstance(error, InputError)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def engine_environment(threads: int, kv_bytes: int) -> dict[str, str]:
    """Variables of a process with a vLLM engine: threads, room for pages on a CPU (whole GiB), and quiet.

    glibc is kept from returning large buffers to the system after each use: it costs plain prefill up to a fifth of
    its time in page faults, by chance of what ran before (vLLM's manual asks for another allocator for that reason).
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "VLLM_CPU_KVCACHE_SPACE": str(-(-kv_bytes >> 30)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
