"""Passes that decide what to recompute: the question over stored KV, and CacheBlend's deviation at an early layer."""

from __future__ import annotations

from typing import Literal

import torch

from blendkv.blend.context import Context
from blendkv.engines.base import StopForward
from blendkv.kernels import (
    AttentionParams,
    Statistic,
    attention_mass,
    decode_vectors,
    kv_deviation,
    rotate,
    selected_attention,
)

DeviationOf = Literal["k", "v", "kv"]
CHECK_LAYER = 1
"""CacheBlend selects after this layer; it and those before it are computed for every candidate."""


class ScoreSession:
    """Runs the fresh rows over the stored KV and notes the attention that every token gets from the question."""

    def __init__(self, context: Context, rows: torch.Tensor, question: torch.Tensor, statistic: Statistic) -> None:
        self._context = context
        self._rows = rows
        self._asking = torch.isin(rows, question).nonzero()[:, 0]
        self._statistic = statistic
        # By layer, because a max over heads must be joined between ranks before the mean over layers is taken, and one
        # exchange costs less than one per layer.
        layers = len(context.runner.layers)
        self._mass = torch.zeros(layers, context.layout.total, dtype=torch.float32, device=rows.device)

    def scores(self) -> torch.Tensor:
        """Mean over layers of the max (or mean) over (heads, question tokens): ``[total]`` float32, by position.

        Equal on all tensor-parallel ranks; each must ask for it.
        """
        return self._context.runner.reduce(self._mass, self._statistic).mean(0)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend over the assembled context and note the layer's attention mass."""
        keys, values = self._context.assemble(layer, self._context.stored(layer), self._rows, k, v)
        done = selected_attention(q, keys, values, self._rows, params, want_lse=True)
        assert done.lse is not None
        asking, places, lse = (t.index_select(0, self._asking) for t in (q, self._rows, done.lse))
        self._mass[layer] = attention_mass(asking, keys, places, params, lse, self._statistic)
        return done.out


class DeviationSession:
    """Computes every candidate for the first layers and measures how far its KV is from the stored one.

    Afterwards ``fresh`` holds the whole K (rotated) and V of the layers that were run, which the recompute pass takes
    over instead of stored KV.
    """

    def __init__(self, context: Context, rows: torch.Tensor, of: DeviationOf, check_layer: int) -> None:
        self._context = context
        self._rows = rows
        self._of = of
        self._check = check_layer
        self._deviation = torch.zeros(context.layout.total, dtype=torch.float32, device=rows.device)
        self.fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def scores(self) -> torch.Tensor:
        """Squared deviation at the check layer: ``[total]`` float32, by position; with several ranks their mean.

        Equal on all tensor-parallel ranks; each must ask for it.
        """
        return self._context.runner.reduce(self._deviation, "mean")

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend over exact spans and fresh rows; stop the pass at the check layer."""
        stored = self._context.stored(layer)
        keys, values = self._context.assemble(layer, stored, self._rows, k, v)
        self.fresh[layer] = (keys.clone(), values.clone())
        if layer < self._check:
            return selected_attention(q, keys, values, self._rows, params).out
        table = self._context.tables.layer(layer)
        for span in self._context.layout.candidates:
            place = slice(span.start, span.stop)
            old_k, old_v = decode_vectors(*stored[span.index], keys.dtype)
            moved = rotate(old_k, None if table is None else table.rows(place))
            self._deviation[place] = kv_deviation(
                keys[place], moved, values[place], old_v, use_k="k" in self._of, use_v="v" in self._of
            )
        raise StopForward
