"""First rates for the loading planner: a few small blends of random tokens, from disk and from memory."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

from blendkv.blend import parse_mode
from blendkv.blend.loading import LoadingPlanner
from blendkv.engines.base import Engine, GenerationOptions
from blendkv.engines.torch.engine import TorchEngine
from blendkv.errors import InputError, StoreError
from blendkv.store.tiered import KVStore
from blendkv.types import Prompt, Segment, TokenIds, as_token_ids

_SIZES = (32, 64, 192, 128)
"""Tokens of a chunk, by round; the first is not learned from, the others are as many as it takes to decide."""
_CHUNKS = 2
_EDGE = 16
"""Tokens of the system message and of the question."""
_MODE = "blend:head_query@0.1"
_MEMORY = 1 << 30


def start_planner(engine: Engine, folder: Path) -> LoadingPlanner:
    """Give an embedded engine a planner, with rates measured on this machine and on the disk of ``folder``.

    A planner that is there already stays. A model that cannot be blended gets one that has nothing to do. Takes about
    as long as the prefill of 2,000 tokens.

    Raises
    ------
    InputError
        If the engine is another one, or ``folder`` cannot be written.
    """
    if not isinstance(engine, TorchEngine):
        raise InputError("the loading planner works with the embedded engine; leave out plan, or use engine torch")
    if engine.planner is None:
        planner = LoadingPlanner()
        if engine.unsupported is None:
            _measure(engine, folder, planner)
        engine.planner = planner
    return engine.planner


def _measure(engine: TorchEngine, folder: Path, planner: LoadingPlanner) -> None:
    """Blend with random chunks in a store of its own below ``folder``, so that ``planner`` learns."""
    rng = np.random.default_rng(0)
    room = (engine.context - 2 * _EDGE - 1) // _CHUNKS
    system = _random_ids(rng, engine, _EDGE)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".rates-") as place:
            for size in _SIZES:
                engine.planner = planner if size != _SIZES[0] else None  # what only the first blend has to do
                chunks = [_random_ids(rng, engine, min(size, room)) for _ in range(_CHUNKS)]
                _blend_cold_and_warm(engine, Path(place), system, chunks, _random_ids(rng, engine, _EDGE))
    except OSError as error:
        raise InputError(f"the disk of {folder} cannot be measured: {error.strerror}; check its rights") from error


def _random_ids(rng: np.random.Generator, engine: TorchEngine, count: int) -> TokenIds:
    return as_token_ids(rng.integers(0, engine.model.config.get_text_config(decoder=True).vocab_size, count).tolist())


def _blend_cold_and_warm(
    engine: TorchEngine, place: Path, system: TokenIds, chunks: list[TokenIds], question: TokenIds
) -> None:
    """The chunks come from disk the first time, where the system can drop its copy of the file, then from memory."""
    with KVStore.open(place / "store", memory_bytes=_MEMORY) as store:
        engine.library(store, "system", system).precompute(chunks, None)
    segments = [Segment("system", system), *(Segment("chunk", c) for c in chunks), Segment("query", question)]
    with KVStore.open(place / "store", memory_bytes=_MEMORY) as store:
        with suppress(StoreError):  # then the disk is measured as the system serves it
            store.drop_page_cache()
        library = engine.library(store, "system", system)
        for _ in range(2):
            engine.generate(Prompt(tuple(segments)), parse_mode(_MODE), library, GenerationOptions(max_new_tokens=1))
