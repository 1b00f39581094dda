"""vLLM models as `ModelRunner`: the model runs itself under a forward context whose attention layers are ours.

vLLM's attention layers look themselves up by name in the forward context. While a session is open, each name leads to a
proxy whose ``impl.forward`` calls the session; every other entry (experts live there too) stays what it is. Nothing in
vLLM is patched, and pages are neither read nor written.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import create_forward_context, override_forward_context
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models.utils import extract_layer_index

from blendkv.blend.rotation import PROBE_TOKENS, probe_layers
from blendkv.engines.base import AttentionSession, LayerSpec, StopForward
from blendkv.engines.vllm.parallel import Ranks
from blendkv.errors import UnsupportedModelError
from blendkv.kernels import AttentionParams, Statistic


class _Impl:
    """Stands for the implementation of one attention layer in a session."""

    def __init__(self, layer: Attention, index: int, session: AttentionSession) -> None:
        self._params = attention_params(layer)
        self._index, self._session = index, session

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Serve vLLM's call: q ``[rows, q_heads, dim]``, k and v ``[rows, kv_heads, dim]``; writes ``output``."""
        return output.copy_(self._session.attend(self._index, query, key, value, self._params).view_as(output))


def attention_params(layer: Attention) -> AttentionParams:
    """Scale, window, soft-cap and sinks of a vLLM attention layer.

    Raises
    ------
    UnsupportedModelError
        If it has a position bias (ALiBi).
    """
    impl = layer.impl
    if getattr(impl, "alibi_slopes", None) is not None:
        raise UnsupportedModelError(
            "attention adds ALiBi slopes to its scores; blending knows RoPE or none: use full prefill"
        )
    return AttentionParams(
        scale=float(impl.scale),
        window=layer.sliding_window,
        softcap=getattr(impl, "logits_soft_cap", None) or None,
        sinks=getattr(impl, "sinks", None),
    )


class VllmRunner:
    """A causal model that vLLM has loaded, under attention sessions. One thread.

    Parameters
    ----------
    model
        vLLM's module, in the worker's process.
    config
        The worker's configuration.
    ranks
        The tensor-parallel ranks; by default those that vLLM has set up. All of them make their runner together.

    Attributes
    ----------
    attention
        vLLM's attention layers by name.

    Raises
    ------
    UnsupportedModelError
        If the model cannot be blended, with the cause; on all ranks, if it is so on one.
    """

    layers: tuple[LayerSpec, ...]

    def __init__(self, model: nn.Module, config: VllmConfig, ranks: Ranks | None = None) -> None:
        self.model: Any = model
        self.ranks = Ranks.of_vllm(config) if ranks is None else ranks
        self._config = config
        hf = config.model_config.hf_text_config
        self.dtype = config.model_config.dtype
        self.device = next(model.parameters()).device
        self.context = int(config.model_config.max_model_len)
        with self.ranks.together():
            self._attention = _attention_layers(config.compilation_config.static_forward_context)
        self.attention = {name: layer for name, (_, layer) in self._attention.items()}
        self._rotary: dict[str, Any] = {
            f"{type(m).__name__}.{i}": m for i, m in enumerate(model.modules()) if hasattr(m, "cos_sin_cache")
        }
        vocab = hf.vocab_size
        token_ids = torch.linspace(vocab // 7, vocab - 1 - vocab // 5, PROBE_TOKENS, device=self.device).long()
        with self.ranks.together(), torch.inference_mode():
            self.layers = probe_layers(self, token_ids, hf.num_hidden_layers)
            self.ranks.share.check(self.layers)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, session: AttentionSession, logits_to_keep: int = 0
    ) -> torch.Tensor | None:
        """Run rows under a session; see `ModelRunner.forward`. Of several ranks, only rank 0 may get logits."""
        context = create_forward_context(None, self._config, skip_compiled=True)
        proxies = {
            name: SimpleNamespace(kv_cache=layer.kv_cache, impl=_Impl(layer, index, session))
            for name, (index, layer) in self._attention.items()
        }
        context.no_compile_layers = {**context.no_compile_layers, **proxies}
        with set_current_vllm_config(self._config), override_forward_context(context):
            try:
                hidden = self.model(input_ids=token_ids, positions=positions)
            except StopForward:
                return None
            return self.model.compute_logits(hidden[-logits_to_keep:]) if logits_to_keep else None

    def rotary(self, positions: torch.Tensor) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """The model's cos and sin, each ``[positions, pairs]``, by rotary module."""
        tables = {}
        for name, module in self._rotary.items():
            cos, sin = module.cos_sin_cache[positions].chunk(2, -1)
            tables[name] = cos.to(self.dtype), sin.to(self.dtype)
        return tables

    def reduce(self, tensor: torch.Tensor, statistic: Statistic) -> torch.Tensor:
        """Join a statistic over heads between the ranks; see `ModelRunner.reduce`."""
        return self.ranks.reduce(tensor, statistic)


def _attention_layers(context: Mapping[str, Any]) -> dict[str, tuple[int, Attention]]:
    """Attention layers by name, with their index; refuses models that have layers of another kind there."""
    found: dict[str, tuple[int, Attention]] = {}
    for name, layer in context.items():
        if isinstance(layer, MLAAttention):
            raise UnsupportedModelError(
                f"{name} is multi-head latent attention (MLA), which is not blended: use full prefill"
            )
        if isinstance(layer, Attention):
            if layer.kv_sharing_target_layer_name is not None:
                raise UnsupportedModelError(
                    f"{name} shares the KV of another layer, which is not blended: use full prefill"
                )
            found[name] = extract_layer_index(name), layer
        elif hasattr(layer, "get_state_shape"):
            raise UnsupportedModelError(f"{name} is a state-space layer, which is not blended: use full prefill")
    return found
