"""Requests under Poisson load: what a mode's speed is worth when questions do not wait for one another."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendkv.blend import Mode
from blendkv.engines.base import Engine, GenerationOptions
from blendkv.errors import InputError
from blendkv.eval.rows import percentiles_ms
from blendkv.library import Library
from blendkv.types import Prompt

FILE = "load.json"


@dataclass(frozen=True)
class LoadSettings:
    """``requests`` arrive at ``rate`` per second on average, gaps exponential by ``seed``, and ask for ``tokens``."""

    requests: int
    rate: float
    tokens: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.requests < 1 or not self.rate > 0.0 or self.tokens < 1:
            raise InputError(
                f"a load of {self.requests} requests at {self.rate:g} per second for {self.tokens} tokens is none; "
                "give at least one request and a rate above 0"
            )


def run_load(
    engine: Engine,
    library: Library,
    prompts: Sequence[Prompt],
    mode_of: Callable[[Prompt], Mode],
    settings: LoadSettings,
) -> dict[str, Any]:
    """Send requests at random times whether or not earlier ones are done, prompts in turn, and wait for all.

    Returns
    -------
    dict
        ``rate`` (offered, per second), ``requests``, ``throughput`` (answers per second from the first arrival to the
        last answer), ``ttft_ms`` (from arrival to first token, waiting included), ``errors``. The arrival times depend
        on the seed alone: every mode meets the same ones.
    """
    gaps = random.Random(settings.seed)
    options = GenerationOptions(max_new_tokens=settings.tokens)
    lock = threading.Lock()
    waits: list[float] = []
    errors: list[str] = []

    def request(prompt: Prompt, arrival: float) -> None:
        try:
            generation = engine.generate(prompt, mode_of(prompt), library, options)
            for _ in generation:
                pass
        except Exception as error:  # counted: the others go on
            with lock:
                errors.append(f"{type(error).__name__}: {error}")
            return
        with lock:
            waits.append((generation.first_token_at or time.perf_counter()) - arrival)

    began = time.perf_counter()
    due, threads = began, []
    for number in range(settings.requests):
        time.sleep(max(0.0, due - time.perf_counter()))
        thread = threading.Thread(target=request, args=(prompts[number % len(prompts)], due), daemon=True)
        thread.start()
        threads.append(thread)
        due += gaps.expovariate(settings.rate)
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    return {
        "rate": settings.rate, "requests": settings.requests, "throughput": len(waits) / seconds,
        "ttft_ms": percentiles_ms(waits), "errors": len(errors), "first_error": errors[0] if errors else None,
    }  # fmt: skip


def write_load(folder: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep what was measured under load, by mode, beside a run's results."""
    (folder / FILE).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def read_load(folder: Path) -> dict[str, Any]:
    """What `write_load` kept; nothing where it did not."""
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
