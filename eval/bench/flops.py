"""Counted FLOPs of a prefill and of a blend: what the speed-up would be if only arithmetic cost time."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from blendkv.blend import BlendReport
from blendkv.engines.base import ModelRunner
from blendkv.kernels import AttentionParams

_ROWS = 32


class _NoAttention:
    """Passes V on: what is left of the model is its work per row."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


class FlopModel:
    """FLOPs of a runner's passes; linear work is counted by torch, attention by its mask."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        ids = torch.arange(3, 3 + _ROWS, device=runner.device)
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            runner.forward(ids, torch.arange(_ROWS, device=runner.device), _NoAttention())
        self.per_row = counter.get_total_flops() / _ROWS

    def attention(self, positions: torch.Tensor, layers: int | None = None) -> float:
        """FLOPs of attention for queries at ``positions`` over the first ``layers`` layers (all by default)."""
        total = 0.0
        for spec in self._runner.layers[:layers]:
            seen = positions + 1
            if spec.params.window is not None:
                seen = seen.clamp(max=spec.params.window)
            total += 2.0 * spec.q_heads * (spec.head_dim + spec.v_head_dim) * float(seen.sum())
        return total

    def full(self, tokens: int) -> float:
        """A full prefill."""
        return tokens * self.per_row + self.attention(torch.arange(tokens))

    def blend(self, report: BlendReport) -> float:
        """A blend: its recompute pass, its scoring pass, its deviation pass. Moving keys counts as nothing."""
        tokens = report.total_tokens
        question = torch.arange(tokens - report.fresh_tokens, tokens)
        rows = torch.cat((report.selected, question))
        total = len(rows) * self.per_row + self.attention(rows)
        if report.scored_rows:
            total += report.scored_rows * self.per_row + self.attention(question)
        layers = len(self._runner.layers)
        early = round(report.budget_spent * layers * report.reusable_tokens) - layers * len(report.selected)
        if early > 0:  # candidates run through the check layers only
            total += early * self.per_row / layers
        return total
