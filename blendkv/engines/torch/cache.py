"""A transformers cache with room to grow in place, which is also where a blend writes its KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from blendkv.engines.base import LayerSpec


class ContiguousLayer(CacheLayerMixin):
    """K and V of one layer, ``[1, kv_heads, capacity, head_dim]``, of which the first ``length`` tokens are filled."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, spec: LayerSpec, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.length = 0
        self.is_initialized = True
        self.dtype, self.device = dtype, device
        self.keys: torch.Tensor = torch.empty(1, spec.kv_heads, capacity, spec.head_dim, dtype=dtype, device=device)
        self.values: torch.Tensor = torch.empty(1, spec.kv_heads, capacity, spec.v_head_dim, dtype=dtype, device=device)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is lazy here."""

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` in all, keeping what is filled."""
        if tokens <= self.keys.shape[2]:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(1, old.shape[1], max(tokens, 2 * old.shape[2]), old.shape[3])
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[1, kv_heads, new, head_dim]`` and return views of all that is filled."""
        end = self.length + key_states.shape[2]
        self.reserve(end)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys after the next update, offset of the first)."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens filled."""
        return self.length

    def get_max_length(self) -> int:
        """No maximum: capacity grows."""
        return -1

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``abs(tokens_to_remove)`` tokens."""
        self.length = max(0, self.length - abs(tokens_to_remove))


class ContiguousCache(Cache):
    """The embedded engine's KV cache and `blendkv.engines.base.KVSink`, batch size 1.

    Sliding-window layers keep all tokens; their masks hide what has left the window.
    """

    layers: list[ContiguousLayer]

    def __init__(self, specs: Sequence[LayerSpec], capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layers=[ContiguousLayer(s, capacity, dtype, device) for s in specs])

    @property
    def length(self) -> int:
        """Tokens whose KV is final."""
        return self.layers[0].length

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in (layer.keys, layer.values))

    def buffer(self, layer: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer as ``[total, kv_heads, head_dim]`` views of the cache."""
        place = self.layers[layer]
        place.reserve(total)
        return place.keys[0, :, :total].transpose(0, 1), place.values[0, :, :total].transpose(0, 1)

    def commit(self, layer: int, total: int) -> None:
        """Nothing to move: the buffer is the cache."""

    def finish(self, total: int) -> None:
        """All layers now hold ``total`` tokens."""
        for layer in self.layers:
            layer.length = total

    def crop_to(self, tokens: int) -> None:
        """Forget what stands behind the first ``tokens``."""
        for layer in self.layers:
            layer.length = min(layer.length, tokens)
