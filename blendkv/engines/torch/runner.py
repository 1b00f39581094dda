"""transformers models as `ModelRunner`: the model runs itself, its attention layers see a session.

No forward loop of ours: the model's own code computes embeddings, projections, norms, MLPs and experts; each attention
layer hands its q, k, v to the current session through transformers' ``AttentionInterface``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from blendkv.blend.causal import CausalSession
from blendkv.blend.rotation import PROBE_TOKENS, probe_layers
from blendkv.engines.base import AttentionSession, LayerSpec, StopForward
from blendkv.errors import UnsupportedModelError
from blendkv.kernels import AttentionParams, Statistic

_SESSION: ContextVar[AttentionSession] = ContextVar("blendkv_session")
_IMPLEMENTATION = "blendkv"
_ATTENTION_TYPES = {None, "full_attention", "sliding_attention"}


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention function: ``[1, heads, rows, dim]`` in, ``[1, rows, heads, dim]`` out."""
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModelError("attention adds a position bias to its scores; blending knows RoPE or none")
    scale = scaling if scaling is not None else 1.0 / math.sqrt(query.shape[-1])
    params = AttentionParams(scale, sliding_window, softcap, s_aux)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    out = _SESSION.get().attend(module.layer_idx, q, k, v, params)  # type: ignore[arg-type]
    return out.unsqueeze(0), None


AttentionInterface.register(_IMPLEMENTATION, _attention)


class TorchRunner:
    """A causal transformers model under attention sessions. Not thread-safe: its engine holds a lock.

    Parameters
    ----------
    model
        In eval mode, on one device.

    Raises
    ------
    UnsupportedModelError
        If the model cannot be blended, with the cause.
    """

    layers: tuple[LayerSpec, ...]

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.dtype, self.device = model.dtype, model.device
        self.context = context_of(self.config)
        refuse_by_config(self.config)
        modules = list(model.modules())
        self._configs = list({id(c): c for m in modules if (c := getattr(m, "config", None)) is not None}.values())
        self._rotary = {
            f"{type(m).__name__}.{i}": m
            for i, m in enumerate(modules)
            if type(m).__name__.endswith("RotaryEmbedding") and not list(m.children())
        }
        for module in self._rotary.values():
            # Frequencies must depend on the text at hand, not on what the model has seen before.
            if getattr(module, "rope_type", None) == "dynamic":
                module.register_forward_pre_hook(_forget_length)
        vocab = self.config.vocab_size
        token_ids = torch.linspace(vocab // 7, vocab - 1 - vocab // 5, PROBE_TOKENS, device=self.device).long()
        try:
            with torch.inference_mode():
                self.layers = probe_layers(self, token_ids, self.config.num_hidden_layers)
                self._compare_with_own_attention()
        except UnsupportedModelError:
            raise
        except Exception as error:
            name = self.config.model_type
            raise UnsupportedModelError(
                f"{name} does not run under the rotation probe ({type(error).__name__}: {error}): use full prefill"
            ) from error

    @contextmanager
    def _under(self, session: AttentionSession) -> Iterator[None]:
        """Point every attention layer at the session while the block runs."""
        before = [c._attn_implementation for c in self._configs]
        token = _SESSION.set(session)
        try:
            for config in self._configs:
                config._attn_implementation = _IMPLEMENTATION
            yield
        finally:
            _SESSION.reset(token)
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation = implementation

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, session: AttentionSession, logits_to_keep: int = 0
    ) -> torch.Tensor | None:
        """Run rows under a session; see `ModelRunner.forward`."""
        inputs = {"input_ids": token_ids[None], "position_ids": positions[None], "use_cache": False}
        with self._under(session):
            try:
                if logits_to_keep == 0:
                    self.model.base_model(**inputs)
                    return None
                return self.model(**inputs, logits_to_keep=logits_to_keep).logits[0]
            except StopForward:
                return None

    def rotary(self, positions: torch.Tensor) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """The model's cos and sin, each ``[positions, pairs]``, under every way that families lay them out."""
        tables: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        for name, module in self._rotary.items():
            for kind in self._layer_types(module):
                kwargs = {} if kind is None else {"layer_type": kind}
                out = module(like, positions[None], **kwargs)
                if not (isinstance(out, tuple) and len(out) == 2):
                    continue
                cos, sin = out[0][0], out[1][0]
                half = cos.shape[-1] // 2
                base = name if kind is None else f"{name}.{kind}"
                tables[f"{base}.joined"] = cos[:, :half], sin[:, :half]
                tables[f"{base}.paired"] = cos[:, ::2], sin[:, ::2]
                tables[f"{base}.single"] = cos, sin
        return tables

    def reduce(self, tensor: torch.Tensor, statistic: Statistic) -> torch.Tensor:
        """All heads are here: nothing to join."""
        return tensor

    def _layer_types(self, module: nn.Module) -> list[str | None]:
        if "layer_type" not in inspect.signature(module.forward).parameters:
            return [None]
        return sorted(set(self.config.layer_types))

    def _compare_with_own_attention(self) -> None:
        """Refuse a model whose attention does something that the sessions do not know of."""
        n = min(48, self.context)
        ids = torch.arange(n, device=self.device) * 7919 % (self.config.vocab_size - 1)
        own = self.model(input_ids=ids[None], use_cache=False).logits[0].float()
        seen = self.forward(ids, torch.arange(n, device=self.device), CausalSession(), n)
        assert seen is not None
        gap = float((own.log_softmax(-1).exp() * (own.log_softmax(-1) - seen.float().log_softmax(-1))).sum(-1).mean())
        allowed = 1e-5 if self.dtype in (torch.float32, torch.float64) else 0.05
        if not gap <= allowed:
            raise UnsupportedModelError(
                f"the model's attention differs from softmax attention with its scale, window, soft-cap and sinks "
                f"(KL {gap:.2g} nats on {n} tokens, allowed {allowed:g}): use full prefill"
            )


def _forget_length(module: Any, inputs: Any) -> None:
    """Forward pre-hook of a dynamic NTK module: transformers keeps the longest length seen, we start from none."""
    module.max_seq_len_cached = module.original_max_seq_len
    module.register_buffer("inv_freq", module.original_inv_freq.to(module.inv_freq.device), persistent=False)


def context_of(config: Any) -> int:
    """Tokens that the model's positions reach; dynamic NTK stretches ``max_position_embeddings`` by its factor."""
    limit = getattr(config, "max_position_embeddings", None) or 1 << 20
    rope = getattr(config, "rope_parameters", None) or {}
    return int(limit * (rope.get("factor", 1.0) if rope.get("rope_type") == "dynamic" else 1.0))


def refuse_by_config(config: Any) -> None:
    """Raise for kinds of model that are known not to blend.

    Raises
    ------
    UnsupportedModelError
        For MLA, encoder-decoders, and layers that are not softmax attention.
    """
    name = config.model_type
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{name} uses multi-head latent attention (MLA), which is not blended: use full prefill"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder; only decoder-only models are blended: use full prefill"
        )
    other = sorted({str(t) for t in getattr(config, "layer_types", None) or ()} - _ATTENTION_TYPES)
    if other:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(other)}; only full and sliding-window softmax attention is blended: "
            "use full prefill"
        )
