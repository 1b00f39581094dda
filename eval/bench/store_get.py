"""Chunks read whole from the daemon's shared memory and from the embedded store, beside a copy of the same tensors.

All chunks of a set larger than the caches take turns, and the sides that are compared take turns chunk by chunk. Copies
go to tensors whose pages are there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from blendkv.daemon.client import DaemonStore
from blendkv.errors import InputError, StoreError
from blendkv.eval.bench.daemon_process import DaemonProcess
from blendkv.eval.bench.kernels import BEYOND_CACHES, SHAPES
from blendkv.eval.bench.rows import Rows
from blendkv.library import materialise
from blendkv.store.base import ChunkReader
from blendkv.store.door import Store
from blendkv.store.tiered import KVStore
from blendkv.types import ChunkKV, Recipe, as_token_ids

PATIENCE = 60.0
"""Deadline of a daemon that is measured: a loaded machine must not look like a dead daemon."""
WRONG = "what was read differs from what was put"
_GONE = "chunk KV {} was put and is gone; use a machine with more free memory and disk"
_FIRST_TOUCHES = 3


@dataclass(frozen=True)
class GetSettings:
    """What is read.

    Attributes
    ----------
    shapes
        (Name in `blendkv.eval.bench.kernels.SHAPES`, layers) per chunk shape.
    tokens
        Of a chunk.
    nbytes
        Raw K and V that the chunks of one shape have together.
    rounds
        In which all take turns; medians are reported.
    """

    shapes: tuple[tuple[str, int], ...] = (("smollm2-135m", 30), ("llama-8b", 32))
    tokens: int = 1200
    nbytes: int = BEYOND_CACHES
    rounds: int = 9

    def __post_init__(self) -> None:
        for name, layers in self.shapes:
            if name not in SHAPES or layers < 1:
                raise InputError(f"unknown shape {name!r} with {layers} layers; allowed: {', '.join(SHAPES)}")
        for name in ("tokens", "nbytes", "rounds"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1 is allowed")


def make_chunks(shape: tuple[str, int], settings: GetSettings) -> list[ChunkKV]:
    """Random chunk KVs in bfloat16 of ``settings.nbytes`` bytes together, two at least."""
    name, layers = shape
    heads, dim = SHAPES[name].kv_heads, SHAPES[name].head_dim
    generator = torch.Generator().manual_seed(0)
    count = max(2, -(-settings.nbytes // (4 * layers * settings.tokens * heads * dim)))
    chunks = []
    for number in range(count):
        noise = torch.randn(2 * layers, settings.tokens, heads, dim, generator=generator).to(torch.bfloat16)
        ids = as_token_ids(np.random.default_rng(number).integers(0, 49_152, settings.tokens))
        k, v = (tuple(t.clone() for t in noise[part::2]) for part in (0, 1))
        chunks.append(ChunkKV(f"bench-{name}", Recipe("bos", (1,), "bfloat16"), ids, k, v))
    return chunks


class Copier:
    """Copies chunks out to tensors of its own, whose pages are there."""

    def __init__(self, like: ChunkKV) -> None:
        self.out = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in map(like.layer, range(like.layers))]

    def copy(self, reader: ChunkReader) -> None:
        """Copy every layer out."""
        for index, (k, v) in enumerate(self.out):
            found = reader.layer(index)
            k.copy_(found[0])
            v.copy_(found[1])

    def holds(self, kv: ChunkKV) -> bool:
        """Whether what was copied last is ``kv``, bit for bit."""
        return all(
            torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
            for index, pair in enumerate(self.out)
            for ours, theirs in zip(pair, kv.layer(index), strict=True)
        )


def measure_get(settings: GetSettings, folder: Path, rows: Rows, tell: Callable[[str], None]) -> None:
    """Rows of the daemon's gets and puts, and of the embedded store's."""
    for shape in settings.shapes:
        tell(f"daemon and embedded store, chunks of {shape[1]} layers of {shape[0]}")
        chunks = make_chunks(shape, settings)
        _daemon(shape[0], chunks, settings, folder / f"daemon-{shape[0]}", rows)
        _embedded(shape[0], chunks, settings, folder / f"embedded-{shape[0]}", rows)


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _found(store: Store, kv: ChunkKV) -> ChunkReader:
    reader = store.get(kv.key, kv.token_ids)
    if reader is None:
        raise StoreError(_GONE.format(kv.key[:12]))
    return reader


class _Sides:
    """Seconds per chunk of copies, and of gets from a store with a copy, in turn.

    ``private`` copies the same tensors from memory of this process, ``mapped`` from what the store has handed out
    already. ``get`` asks for each chunk by itself, ``prompt`` for all at once, as engines do for those of a prompt.
    """

    def __init__(self, chunks: Sequence[ChunkKV]) -> None:
        self._chunks = chunks
        self._copier = Copier(chunks[0])
        self.right = True
        self.private: list[float] = []
        self.mapped: list[float] = []
        self.get: list[float] = []
        self.prompt: list[float] = []

    def run(self, store: Store, rounds: int, mapped: bool = False) -> None:
        """Measure; `right` becomes False if a chunk does not come back as it was put."""
        held = [materialise(_found(store, kv)) for kv in self._chunks] if mapped else []
        for _ in range(rounds):
            for place, kv in enumerate(self._chunks):
                self.private.append(self._seconds(lambda kv=kv: kv))  # type: ignore[misc]
                if mapped:
                    self.mapped.append(self._seconds(lambda place=place: held[place]))  # type: ignore[misc]
                self.get.append(self._seconds(lambda kv=kv: _found(store, kv)))  # type: ignore[misc]
                self.right &= self._copier.holds(kv)
            if mapped:
                self.prompt.append(self._all_at_once(store) / len(self._chunks))

    def _all_at_once(self, store: Store) -> float:
        began = time.perf_counter()
        readers = store.get_all([(kv.key, kv.token_ids) for kv in self._chunks])
        for kv, reader in zip(self._chunks, readers, strict=True):
            if reader is None:
                raise StoreError(_GONE.format(kv.key[:12]))
            self._copier.copy(reader)
        seconds = time.perf_counter() - began
        for kv, reader in zip(
            self._chunks, readers, strict=True
        ):  # afterwards: what is compared leaves the caches cold
            assert reader is not None
            self._copier.copy(reader)
            self.right &= self._copier.holds(kv)
        return seconds

    def _seconds(self, source: Callable[[], ChunkReader]) -> float:
        return seconds_of(lambda: self._copier.copy(source()))

    def over(self, baseline: Sequence[float], gets: Sequence[float] | None = None) -> float:
        """Bandwidth of the gets, those of each chunk by itself by default, over that of a copy."""
        return statistics.median(baseline) / statistics.median(self.get if gets is None else gets)

    def rate(self, seconds: Sequence[float]) -> float:
        """GB/s of a chunk."""
        return self._chunks[0].nbytes / statistics.median(seconds) / 1e9

    @property
    def wrong(self) -> str | None:
        """Why there is no figure."""
        return None if self.right else WRONG


def _daemon(shape: str, chunks: Sequence[ChunkKV], settings: GetSettings, root: Path, rows: Rows) -> None:
    memory = 2 * sum(kv.nbytes for kv in chunks) + (64 << 20)
    with DaemonProcess(root, memory):
        first, steady = _Sides(chunks), _Sides(chunks)
        with DaemonStore(root, PATIENCE) as store:
            put = [seconds_of(lambda kv=kv: store.put(kv)) for kv in chunks]  # type: ignore[misc]
        for _ in range(_FIRST_TOUCHES):
            with DaemonStore(root, PATIENCE) as store:  # another mapping: none of its pages is there
                first.run(store, 1)
        with DaemonStore(root, PATIENCE) as store:
            _Sides(chunks).run(store, 1)
            steady.run(store, settings.rounds, mapped=True)
            overhead = [
                seconds_of(lambda kv=kv: _views(_found(store, kv)))  # type: ignore[misc]
                for _ in range(settings.rounds)
                for kv in chunks
            ]
    mapped, private = f"memcpy, {shape}", f"memcpy_private, {shape}"
    rows.add(mapped, steady.rate(steady.mapped), "GB/s")
    rows.add(private, steady.rate(steady.private), "GB/s")
    wrong = steady.wrong
    for name, gets in (("daemon_get", steady.prompt), ("daemon_get_single", steady.get)):
        ratio = steady.over(steady.mapped, gets)
        rows.add(f"{name}, {shape}", steady.rate(gets), "GB/s", mapped, ratio, wrong=wrong)
    ratio = steady.over(steady.private, steady.prompt)
    rows.add(f"daemon_get_private, {shape}", steady.rate(steady.prompt), "GB/s", private, ratio, wrong=wrong)
    touched = first.over(first.private)
    rows.add(f"daemon_get_first_touch, {shape}", first.rate(first.get), "GB/s", private, touched, wrong=first.wrong)
    rows.add(f"daemon_get_overhead_us, {shape}", statistics.median(overhead) * 1e6, "us", wrong=steady.wrong)
    rows.add(f"daemon_put, {shape}", steady.rate(put), "GB/s", wrong=steady.wrong)


def _views(reader: ChunkReader) -> None:
    for index in range(reader.layers):
        reader.layer(index)


def _embedded(shape: str, chunks: Sequence[ChunkKV], settings: GetSettings, root: Path, rows: Rows) -> None:
    memory, disk = _Sides(chunks), _Sides(chunks)
    with KVStore.open(root, memory_bytes=1 << 40) as store:
        put = [seconds_of(lambda kv=kv: store.put(kv)) for kv in chunks]  # type: ignore[misc]
        memory.run(store, settings.rounds)
    with KVStore.open(root, memory_bytes=0) as store:  # the files are in the page cache: they were written just now
        disk.run(store, settings.rounds)
    copy = f"memcpy_private, {shape}"
    for name, sides in (("memory", memory), ("disk_warm", disk)):
        ratio = sides.over(sides.private)
        rows.add(f"embedded_get_{name}, {shape}", sides.rate(sides.get), "GB/s", copy, ratio, wrong=sides.wrong)
    rows.add(f"embedded_put, {shape}", memory.rate(put), "GB/s", wrong=disk.wrong)
