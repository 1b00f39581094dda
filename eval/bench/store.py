"""`blendkv bench store`: what a store costs beside what it is made of, in one run, with a daemon process.

Rows are ``name, value, unit, baseline, ratio``: ``baseline`` says what ``ratio`` is a ratio to, rates count 1e9 bytes
per GB. What was read is compared with what was put; where it differs, the rows that rest on it have no figure and the
result has a line in ``problems``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blendkv.errors import InputError
from blendkv.eval.bench.codecs import CodecSettings, codec_rows
from blendkv.eval.bench.rows import Row, Rows
from blendkv.eval.bench.store_get import GetSettings, measure_get
from blendkv.eval.bench.store_index import IndexSettings, measure_index
from blendkv.eval.bench.store_model import ModelSettings, measure_put, measure_ttft
from blendkv.eval.bench.store_read import measure_read

PARTS = ("get", "index", "read", "codecs", "ttft", "put")
MODEL_PARTS = ("ttft", "put")


@dataclass(frozen=True)
class StoreSettings:
    """What is measured.

    Attributes
    ----------
    parts
        Of `PARTS`, in their order.
    get
        Chunks that are read whole (parts ``get`` and ``read``).
    index
        The index that is asked (part ``index``).
    codecs
        As for `blendkv.eval.bench.codecs.codec_rows`.
    model
        The prompt of the parts ``ttft`` and ``put``.
    threads
        Of torch.
    judged
        Whether the sizes are those that the aims are for.
    """

    parts: Sequence[str] = PARTS
    get: GetSettings = field(default_factory=GetSettings)
    index: IndexSettings = field(default_factory=IndexSettings)
    codecs: CodecSettings = field(default_factory=CodecSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    threads: int = 1
    judged: bool = True

    def __post_init__(self) -> None:
        if unknown := [p for p in self.parts if p not in PARTS]:
            raise InputError(f"unknown part {unknown[0]!r}; allowed: {', '.join(PARTS)}")
        if not self.parts or self.threads < 1:
            raise InputError("give at least one part, and 1 or more threads")

    @classmethod
    def quick(cls, parts: Sequence[str] | None = None) -> StoreSettings:
        """Small sizes and no model: whether it works, not how fast."""
        chosen = tuple(p for p in PARTS if p not in MODEL_PARTS) if parts is None else parts
        return cls(
            chosen,
            GetSettings((("smollm2-135m", 2),), tokens=64, nbytes=1 << 17, rounds=2),
            IndexSettings(rows=20_000, tokens=16, rounds=20, puts=8),
            CodecSettings(("smollm2-135m",), tokens=60, rounds=1, nbytes=1 << 17),
            ModelSettings(chunks=2, chunk_tokens=40, rounds=1),
            judged=False,
        )


@dataclass(frozen=True)
class StoreResult:
    """Rows, a line per figure that is refused, and a line per aim that is missed (none where sizes are not judged)."""

    rows: list[Row]
    problems: list[str]
    missed: list[str]


@dataclass(frozen=True)
class Aim:
    """What was asked of ``column`` (``value`` or ``ratio``) of the row ``name``, or of its rows per shape or mode."""

    name: str
    column: str
    least: float | None = None
    most: float | None = None

    def missed(self, row: Row) -> str | None:
        """One line if the row misses it."""
        value = row[self.column]
        if value is None or row["name"].split(", ")[0] != self.name:
            return None
        if self.least is not None and value < self.least:
            return f"{row['name']}: {self.column} {value:.3g}, at least {self.least:g} is asked"
        if self.most is not None and value > self.most:
            return f"{row['name']}: {self.column} {value:.3g}, at most {self.most:g} is asked"
        return None


AIMS = (
    Aim("daemon_get", "ratio", least=0.8),
    Aim("daemon_get_overhead_us", "value", most=300.0),
    Aim("lookup_64_of_1m", "value", most=2.0),
    Aim("daemon_rss_mb", "value", most=200.0),
    Aim("ttft_disk_over_memory", "value", most=1.15),
    Aim("put_cost", "value", most=2.0),
    Aim("int8 decode", "ratio", least=0.5),
    Aim("turbo4 decode", "value", least=4.0),
)
"""The figures that the store is to reach."""


def run_store(
    settings: StoreSettings, load: Callable[[], Any] | None = None, tell: Callable[[str], None] = lambda line: None
) -> StoreResult:
    """Measure the parts that are asked for.

    Parameters
    ----------
    settings
        What is measured.
    load
        Loads the `TorchEngine` of the parts ``ttft`` and ``put``.
    tell
        Called with a line per step.

    Raises
    ------
    InputError
        If a part needs a model and none is given.
    StoreError
        If the system lacks what the daemon needs.
    """
    if load is None and set(settings.parts) & set(MODEL_PARTS):
        raise InputError(f"the parts {', '.join(MODEL_PARTS)} need a model; name one, or leave them out")
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    rows = Rows()
    try:
        engine = load() if load is not None and set(settings.parts) & set(MODEL_PARTS) else None
        for part in (p for p in PARTS if p in settings.parts):
            with tempfile.TemporaryDirectory(prefix="blendkv-bench-") as folder:
                _measure(part, settings, engine, Path(folder), rows, tell)
    finally:
        torch.set_num_threads(before)
    missed = [line for row in rows.rows for aim in AIMS if (line := aim.missed(row))]
    return StoreResult(rows.rows, rows.problems, missed if settings.judged else [])


def _measure(
    part: str, settings: StoreSettings, engine: Any, folder: Path, rows: Rows, tell: Callable[[str], None]
) -> None:
    tell(f"part {part}")
    if part == "get":
        measure_get(settings.get, folder, rows, tell)
    elif part == "index":
        measure_index(settings.index, folder, rows, tell)
    elif part == "read":
        measure_read(settings.get, folder, rows, tell)
    elif part == "codecs":
        for row in codec_rows(settings.codecs):
            rows.rows.append(row)
            if row["value"] is None:
                rows.problems.append(f"{row['name']}: the round trip is wrong")
    elif part == "ttft":
        measure_ttft(engine, settings.model, folder, rows, tell)
    else:
        measure_put(engine, settings.model, folder, rows, tell)
