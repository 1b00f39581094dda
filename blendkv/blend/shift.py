"""The shift: what the recomputed tokens of a chunk lend to the rest of it.

In a new place every token's K and V moves; a good part of the move is common to the chunk. At each layer past the
first, the mean difference fresh - stored (K before RoPE) over the chunk's estimating rows is added to all its stored
tokens. A few rows make a noisy mean, which is shrunk:

- ``js`` shrinks each KV head's shift towards nothing by its own noise (James-Stein): max(0, 1 - s^2 / ((n - 1) |d|^2)),
  where s^2 is the per-token variance of the differences and d their mean.
- ``eb`` shrinks each chunk's shift towards the mean over the chunks (empirical Bayes; Efron and Morris 1975): in every
  dimension by B / (B + s^2 / (n - 1)), where B is the variance between the chunks, their noise taken off. A prompt with
  one estimated chunk is shrunk as by ``js``.
- ``trend`` is ``eb`` plus a slope: the move is largest at a chunk's head, which was computed with least before it, and
  goes with the logarithm of the distance from there. One slope for all chunks, by least squares on the rows' deviations
  from their chunk's mean, shrunk per KV head as by ``js``. In the second half of the layers K gets half of it: heads
  there look up what to copy by key, the token that matches moves less than the mean, and the whole shift would hide it
  (docs/selectors.md). Half of it still keeps the other tokens of the chunk from being looked up in its place.

Nothing is summed over heads: a rank that holds some of them needs no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from blendkv.blend.context import Shift
from blendkv.blend.layout import Layout, Span
from blendkv.blend.rotation import RopeTables, RowTables
from blendkv.kernels import Stored, Trend, decode_vectors, unrotate

ShiftKind = Literal["off", "mean", "js", "eb", "trend"]
SHIFT_KINDS: tuple[ShiftKind, ...] = ("off", "mean", "js", "eb", "trend")
MIN_ROWS = 3
"""Fewer estimating rows than this say nothing about a chunk."""
LATE_K = 0.5
"""What ``trend`` leaves of K's shift in the second half of the layers."""


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
        ``mean``, ``js``, ``eb`` or ``trend``.
    layers
        Number of layers of the model.
    """

    def __init__(
        self,
        layout: Layout,
        tables: RopeTables,
        rows: torch.Tensor,
        probes: torch.Tensor,
        kind: ShiftKind,
        layers: int,
    ) -> None:
        self._kind = kind
        self._late = layers // 2
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
        self._owner = owner
        self._weights = (owner == torch.arange(len(self._spans), device=rows.device)[:, None]) / self._counts[:, None]

        if kind == "trend" and self._spans:
            self._lay_trend(rows.device)

    def _lay_trend(self, device: torch.device) -> None:
        """Log distances from the head, about each span's mean over its rows: of the rows, and of all its tokens.

        Tokens before the first row and behind the last get what these get: nothing is extrapolated.
        """
        logs = [torch.log1p(local.float()) for local in self._local]
        self._regressor = torch.cat([log - log.mean() for log in logs])[:, None, None]
        self._along = [
            torch.log1p(torch.arange(len(span), device=device, dtype=torch.float32)).clamp_(log[0], log[-1])
            - log.mean()
            for (span, _), log in zip(self._spans, logs, strict=True)
        ]

    def shifts(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        stored: Mapping[int, tuple[Stored, Stored]],
    ) -> dict[int, Shift]:
        """Shift by span index, from the pass's fresh K (rotated) and V of one layer, ``[rows, kv_heads, head_dim]``.

        Layer 0 sees tokens only, not their context: its shift is nil.
        """
        if layer == 0 or not self._spans:
            return {}
        spans = [span.index for span, _ in self._spans]
        fresh_k = unrotate(k[self._index], self._tables.layer(layer))
        old = [
            decode_vectors(stored[i][0][own], stored[i][1][own], k.dtype)
            for i, own in zip(spans, self._local, strict=True)
        ]
        old_k, old_v = torch.cat([pair[0] for pair in old]), torch.cat([pair[1] for pair in old])
        moved = fresh_k - old_k.float(), v[self._index].float() - old_v.float()
        if self._kind != "trend":
            constant = [self._mean(difference) for difference in moved]
            return {i: Shift(constant[0][n], constant[1][n]) for n, i in enumerate(spans)}
        slopes = [self._slope(difference) for difference in moved]
        # What the slope explains is no noise of the mean.
        constant = [self._mean(d - self._regressor * slope) for d, slope in zip(moved, slopes, strict=True)]
        if layer >= self._late:
            constant[0], slopes[0] = constant[0] * LATE_K, slopes[0] * LATE_K
        return {
            i: Shift(*(Trend(c[n], slope, self._along[n]) for c, slope in zip(constant, slopes, strict=True)))
            for n, i in enumerate(spans)
        }

    def _mean(self, difference: torch.Tensor) -> torch.Tensor:
        """Mean per span, shrunk if asked: ``[m, heads, dim]`` -> ``[spans, heads, dim]``."""
        mean = torch.einsum("sm,mhd->shd", self._weights, difference)
        if self._kind == "mean":
            return mean
        if self._kind in ("eb", "trend") and len(mean) > 1:
            return self._towards_each_other(mean, difference)
        size = mean.square().sum(-1)
        second = torch.einsum("sm,mh->sh", self._weights, difference.square().sum(-1))
        noise = (second - size).clamp_(min=0.0) / (self._counts[:, None] - 1)
        keep = (1.0 - noise / size.clamp(min=torch.finfo(torch.float32).tiny)).clamp_(min=0.0)
        return mean * keep.unsqueeze(-1)

    def _towards_each_other(self, mean: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
        """Each span's mean, shrunk towards the mean of all in every dimension: ``[spans, heads, dim]``."""
        second = torch.einsum("sm,mhd->shd", self._weights, difference.square())
        noise = (second - mean.square()).clamp_(min=0.0) / (self._counts[:, None, None] - 1)
        common = mean.mean(0)
        apart = mean - common
        between = apart.square().sum(0) / (len(mean) - 1) - noise.mean(0)
        between = between.clamp_(min=0.0)
        keep = between / (between + noise).clamp_(min=torch.finfo(torch.float32).tiny)
        return common + apart * keep

    def _slope(self, difference: torch.Tensor) -> torch.Tensor:
        """Slope common to all spans, shrunk per head: ``[m, heads, dim]`` -> ``[heads, dim]``."""
        own = torch.einsum("sm,mhd->shd", self._weights, difference)
        rest = difference - own[self._owner]
        spread = self._regressor.square().sum()
        degrees = len(difference) - len(own) - 1
        if degrees < 1 or spread == 0:
            return torch.zeros_like(rest[0])
        slope = (self._regressor * rest).sum(0) / spread
        left = rest - self._regressor * slope
        noise = left.square().sum((0, -1)) / (degrees * spread)
        size = slope.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
        return slope * (1.0 - noise / size).clamp_(min=0.0)[:, None]
