"""The market live: the same load on `blendkv serve` under one eviction policy after the other, side by side.

Memory and disk of the store have the same limit, a share of the KV that the load asks for: what leaves both must be
computed again, as in a cache that has no larger tier behind it. With a disk that holds everything a miss would be a
read, which on one machine costs next to nothing beside the blend.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from blendkv.errors import InputError
from blendkv.eval.bench.market_live_drive import Sending, drive
from blendkv.eval.bench.market_live_load import Load, make_load
from blendkv.eval.bench.market_live_rows import LiveResult, Side, live_result
from blendkv.eval.bench.market_live_settings import LiveSettings
from blendkv.eval.bench.serve_process import ServeProcess
from blendkv.pipeline import RagPipeline

_CHUNK_TOKENS = 512
"""More than any passage has: each is one chunk."""


def run_market_live(
    model: str, settings: LiveSettings, dtype: str = "auto", tell: Callable[[str], None] = lambda line: None
) -> LiveResult:
    """Run all rounds.

    Raises
    ------
    BlendKVError
        If the passages cannot be ingested or a server cannot be started.
    """
    sides: list[Side] = []
    for seed in settings.seeds:
        load = make_load(seed, settings.requests, settings.rate, settings.speed, settings.corpus, settings.words)
        with tempfile.TemporaryDirectory() as scratch:
            limit = _ingest(load, model, dtype, Path(scratch), settings)
            order = settings.policies if seed % 2 else tuple(reversed(settings.policies))
            for policy in order:
                tell(f"seed {seed}: {len(load.asks)} requests under {policy}, {limit / 1e6:.0f} MB")
                sides.append(_side(policy, seed, load, limit, model, dtype, Path(scratch), settings))
    return live_result(sides, settings)


def _ingest(load: Load, model: str, dtype: str, scratch: Path, settings: LiveSettings) -> int:
    """Make the collection without any chunk KV; return the limit of a tier in bytes."""
    load.write(scratch / "passages.jsonl")
    with RagPipeline.from_store(scratch / "store", model, dtype=dtype) as pipeline:
        report = pipeline.ingest([scratch / "passages.jsonl"], precompute="lazy", chunk_tokens=_CHUNK_TOKENS)
        if report.skipped or report.chunks != len(load.passages):
            raise InputError(f"{len(load.passages)} passages became {report.chunks} chunks; use another tokenizer")
        return round(settings.share * report.tokens * pipeline.library.bytes_per_token)


def _side(
    policy: str, seed: int, load: Load, limit: int, model: str, dtype: str, scratch: Path, settings: LiveSettings
) -> Side:
    folder = shutil.copytree(scratch / "store", scratch / f"store-{policy}")
    options = ("--policy", policy, "--memory", str(limit), "--disk", str(limit), "--dtype", dtype)
    more = ("--max-requests", str(len(load.asks)), "--mode", settings.mode)
    with ServeProcess(folder, model, (*options, *more), settings.threads) as server:
        seen = drive(Sending(server.url, server.model, settings.mode, settings.answer_tokens), load.asks)
        counted = _counted(server)
    shutil.rmtree(folder)
    return Side(policy, seed, load, seen, counted, limit, int(settings.warm_up * len(load.asks)))


def _counted(server: ServeProcess) -> dict[str, float]:
    """What the server counted of its store, over all requests."""
    counts = {event: server.metric("blendkv_library_chunks_total", event=event) for event in ("hits", "computed")}
    tiers = {
        f"{tier}_evictions": server.metric("blendkv_store_evictions_total", tier=tier) for tier in ("memory", "disk")
    }
    refused = {"refused_by_price": server.metric("blendkv_store_refused_total", reason="price")}
    tokens = {"computed_tokens": server.metric("blendkv_library_computed_tokens_total")}
    return {**counts, **tokens, **tiers, **refused}
