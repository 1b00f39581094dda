"""The mean shift: what the recomputed tokens of a chunk lend to the rest of it.

In a new place every token's K and V moves; a good part of the move is common to the chunk. At each layer past the
first, the mean difference fresh - stored (K before RoPE) over the chunk's estimating rows is added to all its stored
tokens. ``js`` shrinks each KV head's shift by its own noise (James-Stein): max(0, 1 - s^2 / ((n - 1) |d|^2)), where
s^2 is the per-token variance of the differences and d their mean. Nothing is summed over heads: a rank that holds some
of them needs no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from blendkv.blend.context import Shift
from blendkv.blend.layout import Layout, Span
from blendkv.blend.rotation import RopeTables, RowTables
from blendkv.kernels import unrotate

ShiftKind = Literal["off", "mean", "js"]
SHIFT_KINDS: tuple[ShiftKind, ...] = ("off", "mean", "js")
MIN_ROWS = 3
"""Fewer estimating rows than this say nothing about a chunk."""


class ShiftEstimator:
    """Estimates the shift of every candidate span from fixed rows of a pass.

    Parameters
    ----------
    layout, tables
        Of the pass.
    rows
        ``[n]`` int64: the absolute positions of the pass's rows, ascending.
    probes
        ``[m]`` int64: the positions among them that estimate.
    kind
        ``mean`` or ``js``.
    """

    def __init__(
        self, layout: Layout, tables: RopeTables, rows: torch.Tensor, probes: torch.Tensor, kind: ShiftKind
    ) -> None:
        self._kind = kind
        self._spans: list[tuple[Span, torch.Tensor]] = []
        for span in layout.candidates:
            own = probes[(probes >= span.start) & (probes < span.stop)]
            if len(own) >= MIN_ROWS:
                self._spans.append((span, own))
        places = torch.cat([own for _, own in self._spans]) if self._spans else probes[:0]
        self._index = torch.searchsorted(rows, places)
        self._local = [own - span.start for span, own in self._spans]
        self._counts = torch.tensor([len(own) for _, own in self._spans], dtype=torch.int64, device=rows.device)
        self._tables = RowTables(tables, places)
        owner = torch.repeat_interleave(torch.arange(len(self._spans), device=rows.device), self._counts)
        self._weights = (owner == torch.arange(len(self._spans), device=rows.device)[:, None]) / self._counts[:, None]

    def shifts(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        stored: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    ) -> dict[int, Shift]:
        """Shift by span index, from the pass's fresh K (rotated) and V of one layer, ``[rows, kv_heads, head_dim]``.

        Layer 0 sees tokens only, not their context: its shift is nil.
        """
        if layer == 0 or not self._spans:
            return {}
        spans = [span.index for span, _ in self._spans]
        fresh_k = unrotate(k[self._index], self._tables.layer(layer))
        old_k = torch.cat([stored[i][0][own] for i, own in zip(spans, self._local, strict=True)])
        old_v = torch.cat([stored[i][1][own] for i, own in zip(spans, self._local, strict=True)])
        d_k = self._mean(fresh_k - old_k.float())
        d_v = self._mean(v[self._index].float() - old_v.float())
        return {i: (d_k[n], d_v[n]) for n, i in enumerate(spans)}

    def _mean(self, difference: torch.Tensor) -> torch.Tensor:
        """Mean per span, shrunk if asked: ``[m, heads, dim]`` -> ``[spans, heads, dim]``."""
        mean = torch.einsum("sm,mhd->shd", self._weights, difference)
        if self._kind == "mean":
            return mean
        size = mean.square().sum(-1)
        second = torch.einsum("sm,mh->sh", self._weights, difference.square().sum(-1))
        noise = (second - size).clamp_(min=0.0) / (self._counts[:, None] - 1)
        keep = (1.0 - noise / size.clamp(min=torch.finfo(torch.float32).tiny)).clamp_(min=0.0)
        return mean * keep.unsqueeze(-1)
