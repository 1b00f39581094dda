"""Counted FLOPs of a prefill and of a blend: what the speed-up would be if only arithmetic cost time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from blendkv.blend import BlendReport, BlendSummary
from blendkv.engines.base import LayerSpec, ModelRunner
from blendkv.kernels import AttentionParams

_ROWS = 32


class _NoAttention:
    """Passes V on: what is left of the model is its work per row."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


class FlopModel:
    """FLOPs of a model's passes.

    Parameters
    ----------
    layers
        Attention layers; attention is counted by its mask.
    per_row
        FLOPs of everything else, per row and over all layers.
    """

    def __init__(self, layers: Sequence[LayerSpec], per_row: float) -> None:
        self._layers = layers
        self.per_row = per_row

    @classmethod
    def counted(cls, runner: ModelRunner) -> FlopModel:
        """Of a runner whose linear work is torch's: counted in a short pass."""
        ids = torch.arange(3, 3 + _ROWS, device=runner.device)
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            runner.forward(ids, torch.arange(_ROWS, device=runner.device), _NoAttention())
        return cls(runner.layers, counter.get_total_flops() / _ROWS)

    def attention(self, positions: torch.Tensor, layers: int | None = None) -> float:
        """FLOPs of attention for queries at ``positions`` over the first ``layers`` layers (all by default)."""
        total = 0.0
        for spec in self._layers[:layers]:
            seen = positions + 1
            if spec.params.window is not None:
                seen = seen.clamp(max=spec.params.window)
            total += 2.0 * spec.q_heads * (spec.head_dim + spec.v_head_dim) * float(seen.sum())
        return total

    def full(self, tokens: int) -> float:
        """A full prefill."""
        return tokens * self.per_row + self.attention(torch.arange(tokens))

    def blend(self, report: BlendSummary) -> float:
        """A blend: its recompute pass, its scoring pass, its deviation pass. Moving keys counts as nothing.

        A summary does not say which tokens were selected: they are then taken to be spread evenly before the question.
        """
        tokens = report.total_tokens
        question = torch.arange(tokens - report.fresh_tokens, tokens)
        if isinstance(report, BlendReport):
            selected = report.selected
        else:
            selected = torch.linspace(0, tokens - report.fresh_tokens, report.recomputed_tokens).long()
        rows = torch.cat((selected, question))
        total = len(rows) * self.per_row + self.attention(rows)
        if report.scored_rows:
            total += report.scored_rows * self.per_row + self.attention(question)
        layers = len(self._layers)
        early = round(report.budget_spent * layers * report.reusable_tokens) - layers * report.recomputed_tokens
        if early > 0:  # candidates run through the check layers only
            total += early * self.per_row / layers
        return total
