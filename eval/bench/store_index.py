"""Look-ups in a large index, and what a daemon with that index holds of memory.

The chunks are rows with an empty file each: the daemon finds them when it starts, answers look-ups from their rows,
and deletes their files when it evicts them. Only those that are put while it runs have K and V.
"""

from __future__ import annotations

import hashlib
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from blendkv.daemon.client import DaemonStore
from blendkv.errors import InputError
from blendkv.eval.bench.daemon_process import DaemonProcess
from blendkv.eval.bench.rows import Rows
from blendkv.eval.bench.store_get import PATIENCE, WRONG, Copier, seconds_of
from blendkv.store.chunkfile import token_ids_digest
from blendkv.store.disk import chunk_path
from blendkv.store.index import Index, Row
from blendkv.store.opening import INDEX_NAME
from blendkv.types import ChunkKV, Recipe, TokenIds, as_token_ids

KEYS = 64
"""Keys in one look-up."""
_BATCH = 20_000  # rows in one transaction
_FILE = 4096  # bytes that a row says its file has
_MEMORY = 64 << 20  # bytes of the daemon's arena
_RECIPE = Recipe("bos", (1,), "bfloat16")


@dataclass(frozen=True)
class IndexSettings:
    """How large the index is.

    Attributes
    ----------
    rows
        Chunks in the index.
    tokens
        Of each.
    rounds
        Look-ups that are timed.
    puts
        Chunks that are put when the disk's limit is reached, so that each evicts others.
    """

    rows: int = 1_000_000
    tokens: int = 256
    rounds: int = 500
    puts: int = 64

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "rounds", "puts"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is allowed")
        if self.rows < KEYS:
            raise InputError(f"rows is {self.rows}; at least {KEYS} are needed")


def measure_index(settings: IndexSettings, folder: Path, rows: Rows, tell: Callable[[str], None]) -> None:
    """Rows of look-ups, and of the daemon's memory: at its start, after look-ups, and after puts that evict."""
    root = folder / "store"
    tell(f"an index of {settings.rows:,} rows")
    fill(root, settings)
    limit = settings.rows * _FILE
    tell("look-ups, and puts that evict")
    began = time.perf_counter()
    with DaemonProcess(root, _MEMORY, limit) as daemon, DaemonStore(root, PATIENCE) as store:
        start = time.perf_counter() - began
        held = {"start": daemon.resident()["own"]}
        seconds, right = _look_up(store, settings)
        held["lookups"] = daemon.resident()["own"]
        puts, kept = _put(store, settings)
        held["puts"] = daemon.resident()["own"]
        peak = daemon.resident()
        whole = daemon.chunks == settings.rows
    name = f"lookup_{KEYS}_of_{_count(settings.rows)}"
    lost = None if whole else "the daemon did not find all rows"
    wrong = lost or (None if right else WRONG)
    rows.add(name, statistics.median(seconds) * 1e3, "ms", wrong=wrong)
    rows.add(f"{name}_p99", float(np.quantile(seconds, 0.99)) * 1e3, "ms", wrong=wrong)
    wrong = wrong or (None if kept else WRONG)
    rows.add("daemon_rss_mb", max(held.values()) / 1e6, "MB", wrong=wrong)
    for when, size in held.items():
        rows.add(f"daemon_rss_after_{when}_mb", size / 1e6, "MB", wrong=wrong)
    rows.add("daemon_peak_mb", (peak["peak"] - peak["arena"]) / 1e6, "MB", wrong=wrong)
    rows.add("daemon_start", start, "s", wrong=lost)
    rows.add("daemon_put_evicting", statistics.median(puts) * 1e3, "ms", wrong=wrong)


def fill(root: Path, settings: IndexSettings) -> None:
    """Make a store with ``settings.rows`` chunks, each a row and an empty file."""
    for group in range(256):
        (root / "kv" / f"{group:02x}").mkdir(parents=True)
    index = Index(root / INDEX_NAME)
    try:
        for first in range(0, settings.rows, _BATCH):
            (root / _group(first)).touch()
        for first in range(0, settings.rows, _BATCH):
            with index.transaction():
                for number in range(first, min(first + _BATCH, settings.rows)):
                    key, ids = _key(number), _ids(number, settings)
                    path = chunk_path(key)
                    index.insert(Row(key, "bench", _RECIPE, ids, _FILE, _FILE, path, 0.0, 0.0))
                    os.link(f"{root}/{_group(first)}", f"{root}/{path}")  # takes half the time of a file of its own
    finally:
        index.close()


def _group(first: int) -> str:
    """The empty file that the chunks of a batch share: a file has 65,000 names at most."""
    return f"kv/empty-{first}"


def _key(number: int) -> str:
    return hashlib.sha256(number.to_bytes(8, "little")).hexdigest()


def _ids(number: int, settings: IndexSettings) -> TokenIds:
    return as_token_ids(np.arange(number, number + settings.tokens, dtype=np.int32))


def _count(rows: int) -> str:
    """A round number, in short."""
    return f"{rows // 1_000_000}m" if rows % 1_000_000 == 0 else f"{rows // 1000}k"


def _look_up(store: DaemonStore, settings: IndexSettings) -> tuple[list[float], bool]:
    """Seconds of every look-up, and whether all answers were right; one key in each is not there."""
    rng, seconds, right = random.Random(0), [], True
    for _ in range(settings.rounds):
        numbers = [*rng.sample(range(settings.rows), KEYS - 1), settings.rows + rng.randrange(1000)]
        keys = [_key(number) for number in numbers]
        found: list[str | None] = []
        seconds.append(seconds_of(lambda keys=keys, found=found: found.extend(store.lookup(keys))))  # type: ignore[misc]
        truth = [token_ids_digest(_ids(number, settings)) for number in numbers[:-1]]
        right &= found == [*truth, None]
    return seconds, right


def _put(store: DaemonStore, settings: IndexSettings) -> tuple[list[float], bool]:
    """Seconds of every put, and whether what was put is there, and as many others left as had to.

    Which ones is the policy's choice: the market samples chunks beyond the oldest.
    """
    generator, seconds, right = torch.Generator().manual_seed(0), [], True
    before = store.stat().tiers[-1].chunks
    for number in range(settings.puts):
        k, v = torch.randn(2, 16, 2, 64, generator=generator).to(torch.bfloat16)
        kv = ChunkKV("bench", _RECIPE, as_token_ids(np.arange(16) + number), (k,), (v,))
        seconds.append(seconds_of(lambda kv=kv: store.put(kv)))  # type: ignore[misc]
        copier, reader = Copier(kv), store.get(kv.key, kv.token_ids)
        if reader is None:
            return seconds, False
        copier.copy(reader)
        right &= copier.holds(kv)
    gone = before + settings.puts - store.stat().tiers[-1].chunks
    return seconds, right and gone >= settings.puts
