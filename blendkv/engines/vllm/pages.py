"""Where blended KV goes: vLLM's pages, written by vLLM's own writer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.model_executor.models.utils import extract_layer_index

from blendkv.engines.base import ModelRunner
from blendkv.engines.vllm.messages import Load

NULL_BLOCK = 0
"""vLLM's block for tokens that no layer of a group will look at any more (behind a sliding window)."""


@dataclass(frozen=True)
class PagedLayer:
    """An attention layer of vLLM, the KV cache group that its pages belong to, and that group's block size."""

    layer: Any
    group: int
    block_size: int


def paged_layers(attention: dict[str, Any], kv_cache_config: Any) -> list[PagedLayer]:
    """The layers of ``attention`` (by name) with their groups, in the model's order."""
    places: dict[str, tuple[int, int]] = {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            places[name] = index, int(group.kv_cache_spec.block_size)
    return [PagedLayer(attention[name], *places[name]) for name in sorted(attention, key=extract_layer_index)]


class PagedSink:
    """`KVSink` over vLLM's pages: a layer's K and V are put together beside them and written behind ``written``."""

    def __init__(self, layers: Sequence[PagedLayer], load: Load, runner: ModelRunner) -> None:
        self.length = 0
        self._layers, self._runner, self._load = layers, runner, load
        self._slots: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._scratch: tuple[torch.Tensor, torch.Tensor] | None = None

    def _targets(self, place: PagedLayer) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Slots of a group's rows, and which rows they are; None for all behind ``written``."""
        known = self._slots.get(place.group)
        if known is None:
            positions = np.arange(self._load.written, len(self._load.token_ids))
            blocks = np.asarray(self._load.block_ids[place.group])[positions // place.block_size]
            kept = blocks != NULL_BLOCK
            slots = torch.from_numpy((blocks * place.block_size + positions % place.block_size)[kept])
            rows = None if kept.all() else torch.from_numpy(positions[kept]).to(self._runner.device)
            known = slots.to(device=self._runner.device, dtype=torch.int64), rows
            self._slots[place.group] = known
        return known

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
        place = self._layers[layer]
        slots, rows = self._targets(place)
        if len(slots) == 0:
            return
        k, v = (t[self._load.written :] if rows is None else t[rows] for t in self._scratch)
        place.layer.impl.do_kv_cache_update(place.layer, k, v, place.layer.kv_cache, slots)

    def finish(self, total: int) -> None:
        """All layers are in the pages."""
        self.length = total
