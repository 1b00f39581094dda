"""The worker's half of the connector: compute missing chunks, blend requests into vLLM's pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.tokenizers import cached_tokenizer_from_config

from blendkv.blend import BlendReport, BlendSettings, blend, collect
from blendkv.daemon.pinning import pin_for
from blendkv.engines.base import KVSource
from blendkv.engines.vllm.messages import Compute, Load, Piece
from blendkv.engines.vllm.pages import PagedLayer, PagedSink, paged_layers
from blendkv.engines.vllm.parallel_library import library as parallel_library
from blendkv.engines.vllm.plugin import loaded_model
from blendkv.engines.vllm.runner import VllmRunner
from blendkv.errors import StoreError, UnsupportedModelError
from blendkv.library import ChunkLibrary, PromptSource
from blendkv.market.context import using
from blendkv.matching import SlicedReader
from blendkv.store.base import ChunkReader
from blendkv.store.codecs import RAW
from blendkv.store.door import Store
from blendkv.store.prefetch import LayerPrefetcher
from blendkv.types import ChunkKV, Prompt, Recipe, RecipeKind, TokenIds, as_token_ids

_LIBRARIES = 64
"""Recipes (system prefixes, tenants) whose library is kept."""


class BlendWorker:
    """The model and the store of one worker. A `ChunkEngine`.

    Parameters
    ----------
    config, kv_cache_config
        Of the worker.
    store
        Open; it stays the caller's.
    fingerprint
        Of the model.
    codec
        How chunk KVs are stored.

    Raises
    ------
    UnsupportedModelError
        If the model cannot be blended.
    """

    def __init__(
        self, config: VllmConfig, kv_cache_config: Any, store: Store, fingerprint: str, codec: str = RAW
    ) -> None:
        if config.model_config.is_multimodal_model:
            raise UnsupportedModelError("multimodal models are not blended: use full prefill")
        self.runner = VllmRunner(loaded_model(), config)
        self.fingerprint, self.store, self.codec = fingerprint, store, codec
        self.dtype = str(self.runner.dtype).removeprefix("torch.")
        self.bos_token_id = bos_token_id(config)
        self._libraries: dict[tuple[RecipeKind, bytes, str], ChunkLibrary] = {}
        self._layers: list[PagedLayer] = paged_layers(self.runner.attention, kv_cache_config)
        self._pins = pin_for(store, self.runner.device)

    def collect(self, recipe: Recipe, chunks: Sequence[TokenIds], prefix: ChunkKV | None) -> list[ChunkKV]:
        """Compute chunk KVs alone; see `blendkv.blend.collect`."""
        return collect(self.runner, self.fingerprint, recipe, chunks, prefix)

    def library(self, kind: RecipeKind, prefix: TokenIds, tenant: str = "") -> ChunkLibrary:
        """The library of a recipe; its counts go on from request to request."""
        name = kind, prefix.tobytes() if kind == "system" else b"", tenant
        found = self._libraries.pop(name, None)
        if found is None:
            found = parallel_library(self.runner.ranks, self, self.store, kind, prefix, self.codec, tenant)
            while len(self._libraries) >= _LIBRARIES:
                self._libraries.pop(next(iter(self._libraries)))
        self._libraries[name] = found
        return found

    def compute(self, work: Compute) -> int:
        """Compute and store the chunks that the store lacks; returns how many."""
        ranks = self.runner.ranks
        with using(work.use), ranks.together():
            library = self.library(work.recipe, as_token_ids(work.prefix), work.tenant)
            wanted = [as_token_ids(chunk) for chunk in work.chunks]
            missing = ranks.decide(lambda: [not library.has(ids) for ids in wanted])
            return sum(1 for _ in library.compute([ids for ids, m in zip(wanted, missing, strict=True) if m]))

    def blend(self, load: Load) -> BlendReport:
        """Blend one request into its pages.

        Raises
        ------
        StoreError
            If stored KV cannot be read; a damaged chunk has been dropped then.
        """
        prompt = load.prompt()
        sink = PagedSink(self._layers, load, self.runner)
        with using(load.use), self.runner.ranks.together(), self._source(load, prompt) as source:
            try:
                return blend(self.runner, prompt, source, sink, load.settings)
            finally:
                if self._pins:  # copies from page-locked memory go on by themselves, and its owner may let go of it now
                    torch.cuda.synchronize(self.runner.device)

    def prefill(self, load: Load) -> None:
        """Write the exact KV of one request into its pages: every token computed fresh."""
        prompt = load.prompt()
        source = _Nothing(len(prompt.segments))
        with self.runner.ranks.together():
            sink = PagedSink(self._layers, load, self.runner)
            blend(self.runner, prompt, source, sink, BlendSettings("strided", 0.0))

    @contextmanager
    def _source(self, load: Load, prompt: Prompt) -> Iterator[KVSource]:
        """Stored KV of the request's pieces; chunks with known boundaries are computed when they are missing."""
        if not any(piece.key for piece in load.pieces):
            first = prompt.segments[0]
            prefix = first.token_ids if first.kind == "system" else as_token_ids([])
            with self.library(load.recipe, prefix, load.tenant).source(prompt) as source:
                yield source
            return
        ranks = self.runner.ranks
        with ranks.together():
            readers = [
                ranks.local(self._slice(piece, segment.token_ids)) if piece.key else None
                for piece, segment in zip(load.pieces, prompt.segments, strict=True)
            ]
        stored = [r for r in readers if r is not None]
        with LayerPrefetcher(stored, len(self.runner.layers)) as prefetcher:
            yield PromptSource(readers, prefetcher)

    def _slice(self, piece: Piece, token_ids: TokenIds) -> ChunkReader:
        """The piece's part of a stored chunk, its token ids compared once more."""
        assert piece.key is not None
        whole = self.store.token_ids(piece.key)
        reader = None if whole is None else self.store.get(piece.key, whole)
        if reader is None or whole is None:
            raise StoreError(f"chunk {piece.key[:12]} left the store before it was blended")
        stop = piece.first + piece.tokens
        if not np.array_equal(whole[piece.first : stop], token_ids):
            raise StoreError(f"chunk {piece.key[:12]} does not hold the prompt's tokens")
        return reader if piece.tokens == len(whole) else SlicedReader(reader, piece.first, stop)


class _Nothing:
    """A `KVSource` with nothing stored."""

    def __init__(self, segments: int) -> None:
        self.readers: Sequence[ChunkReader | None] = [None] * segments

    def layer(self, index: int) -> Sequence[None]:
        """Nothing."""
        return [None] * len(self.readers)


def described(report: BlendReport) -> dict[str, Any]:
    """A report as plain values, to travel to the scheduler and on to the client."""
    names = (
        "selector", "shift", "budget_asked", "budget_spent", "total_tokens", "reusable_tokens", "exact_tokens",
        "fresh_tokens", "recomputed_tokens", "scored_rows", "bytes_loaded", "stages",
    )  # fmt: skip
    return {name: getattr(report, name) for name in names}


def bos_token_id(config: VllmConfig) -> int | None:
    """The tokenizer's BOS, which `bos` chunks stand behind; the model's own where vLLM loads no tokenizer."""
    if config.model_config.skip_tokenizer_init:
        found = getattr(config.model_config.hf_text_config, "bos_token_id", None)
    else:
        found = cached_tokenizer_from_config(config.model_config).bos_token_id
    return None if found is None else int(found)


def model_folder(config: VllmConfig) -> Path:
    """The folder of vLLM's model, whose content the fingerprint is taken of."""
    name = config.model_config.model
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=config.model_config.revision, local_files_only=True))
