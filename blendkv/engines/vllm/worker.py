"""The worker's half of the connector: blend a request's stored chunks into vLLM's pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig

from blendkv.blend import BlendReport, BlendSettings, blend, collect
from blendkv.engines.fingerprint import fingerprint_folder
from blendkv.engines.vllm.plugin import loaded_model
from blendkv.engines.vllm.runner import VllmRunner
from blendkv.library import ChunkLibrary
from blendkv.store.tiered import KVStore
from blendkv.types import ChunkKV, Prompt, Recipe, Segment, TokenIds, as_token_ids

MEMORY_BYTES = 2 << 30
"""Limit of the store's memory tier in the worker."""


@dataclass(frozen=True)
class Load:
    """A request to blend: its tokens but the last, its segments, and the blocks that its KV goes to.

    ``written`` tokens are in the blocks already (a local hit) and are not written again.
    """

    request_id: str
    token_ids: tuple[int, ...]
    segments: tuple[tuple[str, int], ...]
    settings: BlendSettings
    block_ids: tuple[int, ...]
    written: int

    def prompt(self) -> Prompt:
        """The tokens, cut into segments."""
        parts, start = [], 0
        for kind, length in self.segments:
            parts.append(Segment(kind, as_token_ids(self.token_ids[start : start + length])))  # type: ignore[arg-type]
            start += length
        return Prompt(tuple(parts))


class PagedSink:
    """`KVSink` over vLLM's pages: a layer's K and V are put together beside them and written by vLLM's own writer."""

    def __init__(self, layers: Sequence[Any], load: Load, block_size: int, runner: VllmRunner) -> None:
        self.length = 0
        self._layers, self._runner = layers, runner
        positions = np.arange(load.written, len(load.token_ids))
        blocks = np.asarray(load.block_ids)[positions // block_size]
        slots = torch.from_numpy(blocks * block_size + positions % block_size)
        self._slots = slots.to(device=runner.device, dtype=torch.int64)
        self._written = load.written
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None

    def buffer(self, layer: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scratch K and V, ``[total, kv_heads, head_dim]``, shared by all layers of one shape."""
        spec = self._runner.layers[layer]
        shapes = (total, spec.kv_heads, spec.head_dim), (total, spec.kv_heads, spec.v_head_dim)
        if self._scratch is None or tuple(t.shape for t in self._scratch) != shapes:
            k, v = (torch.empty(shape, dtype=self._runner.dtype, device=self._runner.device) for shape in shapes)
            self._scratch = k, v
        return self._scratch

    def commit(self, layer: int, total: int) -> None:
        """Write the layer's rows that are not in the pages yet."""
        assert self._scratch is not None
        k, v = (t[self._written :] for t in self._scratch)
        place = self._layers[layer]
        place.impl.do_kv_cache_update(place, k, v, place.kv_cache, self._slots)

    def finish(self, total: int) -> None:
        """All layers are in the pages."""
        self.length = total


class BlendWorker:
    """The model, the store, and what happened. A `ChunkEngine`."""

    def __init__(self, config: VllmConfig, folder: str) -> None:
        self.runner = VllmRunner(loaded_model(), config)
        self.fingerprint = fingerprint_folder(Path(config.model_config.model))
        self.dtype = str(self.runner.dtype).removeprefix("torch.")
        self.bos_token_id: int | None = getattr(config.model_config.hf_text_config, "bos_token_id", None)
        self._block_size = config.cache_config.block_size
        self.store = KVStore.open(folder, memory_bytes=MEMORY_BYTES)

    def collect(self, recipe: Recipe, chunks: Sequence[TokenIds], prefix: ChunkKV | None) -> list[ChunkKV]:
        """Compute chunk KVs alone; see `blendkv.blend.collect`."""
        return collect(self.runner, self.fingerprint, recipe, chunks, prefix)

    def blend(self, load: Load, layers: Sequence[Any]) -> BlendReport:
        """Blend one request into its pages; chunks that the store lacks are computed alone first, and stored."""
        prompt = load.prompt()
        first = prompt.segments[0]
        prefix = first.token_ids if first.kind == "system" else as_token_ids([])
        library = ChunkLibrary(self, self.store, "system", prefix)
        sink = PagedSink(layers, load, self._block_size, self.runner)
        with library.source(prompt) as source:
            return blend(self.runner, prompt, source, sink, load.settings)
