"""Putting one layer's K and V together: stored spans moved to their positions, fresh rows written over them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from blendkv.blend.layout import Layout, Span
from blendkv.blend.rotation import RopeTables
from blendkv.engines.base import KVSink, KVSource, ModelRunner
from blendkv.kernels import Move, RopeTable, Trend, rope_shift_scatter_all


@dataclass(frozen=True)
class Shift:
    """What is added to a span's stored K (before RoPE) and V: ``[kv_heads, head_dim]`` float32, or a trend."""

    k: torch.Tensor | Trend
    v: torch.Tensor | Trend


class Context:
    """The keys and values that a pass attends to, assembled layer by layer in the sink's buffer.

    ``seconds`` gathers the time spent by stage: ``load`` (waiting for the source) and ``rotate`` (assembly).
    """

    def __init__(self, runner: ModelRunner, layout: Layout, source: KVSource, sink: KVSink) -> None:
        self.runner = runner
        self.layout = layout
        self.source = source
        self.sink = sink
        self.tables = RopeTables(runner, torch.arange(layout.total, device=runner.device))
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._rows: dict[tuple[int, int], RopeTable] = {}

    def stored(self, layer: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """K and V of the stored spans of one layer, by span index, on the runner's device."""
        if not self.layout.stored:
            return {}
        began = time.perf_counter()
        pairs = self.source.layer(layer)
        device = self.runner.device
        found = {
            i: (pair[0].to(device, non_blocking=True), pair[1].to(device, non_blocking=True))
            for i, pair in enumerate(pairs)
            if pair is not None
        }
        self.seconds["load"] += time.perf_counter() - began
        return found

    def assemble(
        self,
        layer: int,
        stored: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        rows: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shifts: Mapping[int, Shift] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's whole K (rotated) and V, ``[total, kv_heads, head_dim]``: the sink's buffer, filled.

        ``rows`` are the absolute positions of the fresh ``k`` and ``v``, which overwrite what was stored there.
        """
        began = time.perf_counter()
        table = self.tables.layer(layer)
        all_k, all_v = self.sink.buffer(layer, self.layout.total)
        moves = []
        for span in self.layout.stored:
            shift = shifts.get(span.index) if shifts else None
            biases = (None, None) if shift is None else (shift.k, shift.v)
            moves.append(Move(*stored[span.index], self._rows_of(table, span), span.start, *biases))
        rope_shift_scatter_all(moves, all_k, all_v)
        all_k.index_copy_(0, rows, k)
        all_v.index_copy_(0, rows, v)
        self.seconds["rotate"] += time.perf_counter() - began
        return all_k, all_v

    def _rows_of(self, table: RopeTable | None, span: Span) -> RopeTable | None:
        """The rows of a table at a span's positions, cut once per kind of rotation and not once per layer."""
        if table is None:
            return None
        key = id(table), span.index
        if key not in self._rows:
            self._rows[key] = table.rows(slice(span.start, span.stop))
        return self._rows[key]
