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
from blendkv.kernels import Move, RopeTable, Stored, Trend, decode_vectors, rope_shift_scatter_all


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

    def stored(self, layer: int) -> dict[int, tuple[Stored, Stored]]:
        """K and V of the stored spans of one layer, by span index, on the runner's device.

        On a CPU coded ones stay coded: `assemble` decodes them on their way, which saves writing them out and reading
        them again. For another device they are decoded before they are moved.
        """
        if not self.layout.stored:
            return {}
        began = time.perf_counter()
        found = {i: pair for i, pair in enumerate(self.source.layer(layer)) if pair is not None}
        device = self.runner.device
        if device.type != "cpu":
            values = {i: decode_vectors(*pair, self.runner.dtype) for i, pair in found.items()}
            found = {
                i: (k.to(device, non_blocking=True), v.to(device, non_blocking=True)) for i, (k, v) in values.items()
            }
        self.seconds["load"] += time.perf_counter() - began
        return found

    def assemble(
        self,
        layer: int,
        stored: Mapping[int, tuple[Stored, Stored]],
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
