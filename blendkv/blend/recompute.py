"""The recompute session: the selected rows run through the model and see the whole blended context."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from blendkv.blend.context import Context
from blendkv.blend.shift import ShiftEstimator
from blendkv.kernels import AttentionParams, selected_attention


class RecomputeSession:
    """Layer by layer: shift the stored KV, move it, write the fresh rows over it, attend, hand it to the sink.

    Parameters
    ----------
    context
        Of the prompt.
    rows
        ``[n]`` int64: absolute positions of this pass, ascending.
    shift
        Estimates the mean shift; None leaves the stored KV as it is.
    fresh
        Whole K (rotated) and V of layers that a selection pass has computed for every row already.
    """

    def __init__(
        self,
        context: Context,
        rows: torch.Tensor,
        shift: ShiftEstimator | None,
        fresh: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._context = context
        self._rows = rows
        self._shift = shift
        self._fresh = fresh

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Build the layer's final K and V, attend the rows over them, and commit them."""
        context = self._context
        total = context.layout.total
        if layer in self._fresh:
            keys, values = context.sink.buffer(layer, total)
            first = context.layout.offset
            keys[first:] = self._fresh[layer][0][first:]
            values[first:] = self._fresh[layer][1][first:]
        else:
            stored = context.stored(layer)
            shifts = None if self._shift is None else self._shift.shifts(layer, k, v, stored)
            keys, values = context.assemble(layer, stored, self._rows, k, v, shifts)
        out = selected_attention(q, keys, values, self._rows, params).out
        context.sink.commit(layer, total)
        return out
