"""Plain causal attention through the blend's own kernel: a full prefill of rows at positions 0, 1, 2, ..."""

from __future__ import annotations

import torch

from blendkv.kernels import AttentionParams, selected_attention


class CausalSession:
    """Every row sees the rows before it and itself."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """See `blendkv.engines.base.AttentionSession`."""
        return selected_attention(q, k, v, torch.arange(q.shape[0], device=q.device), params).out
