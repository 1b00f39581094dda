"""How close a mode is to full prefill: KL and top-1 agreement on full prefill's own greedy continuation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blendkv.blend import BlendReport, BlendSettings
from blendkv.engines.torch.engine import TorchEngine
from blendkv.eval.subject import CONTINUATION
from blendkv.library import ChunkLibrary
from blendkv.types import Prompt, to_tensor


@dataclass(frozen=True)
class Reference:
    """Full prefill's greedy continuation ``tokens`` and its log-probabilities ``[tokens, vocab]``, float32."""

    tokens: torch.Tensor
    log_probs: torch.Tensor


@dataclass(frozen=True)
class Fidelity:
    """Mean KL(full || mode) in nats, and the share of positions with the same most likely token."""

    kl: float
    top1: float


def reference(engine: TorchEngine, prompt: Prompt, tokens: int = CONTINUATION) -> Reference:
    """Prefill the prompt in full by the model's own attention and continue it greedily for ``tokens`` tokens."""
    ids = to_tensor(prompt.token_ids, engine.model.device)[None]
    rows, chosen = [], []
    with engine.lock, torch.inference_mode():
        out = engine.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        for step in range(tokens):
            rows.append(out.logits[0, -1].float().log_softmax(-1))
            chosen.append(rows[-1].argmax())
            if step + 1 < tokens:
                out = engine.model(
                    input_ids=chosen[-1].view(1, 1),
                    past_key_values=out.past_key_values,
                    use_cache=True,
                    logits_to_keep=1,
                )
    return Reference(torch.stack(chosen), torch.stack(rows))


def blended(
    engine: TorchEngine, library: ChunkLibrary, prompt: Prompt, truth: Reference, settings: BlendSettings
) -> tuple[Fidelity, BlendReport]:
    """Blend the prompt and score full prefill's continuation behind it, teacher-forced.

    At most 16 rows of logits are compared: KL(full || mode) = sum p_full (log p_full - log p_mode).
    """
    cache = engine.new_cache(len(prompt) + len(truth.tokens))
    with library.source(prompt) as source:
        report = engine.blend(prompt, source, cache, settings, logits_to_keep=1)
    assert report.logits is not None
    logits = report.logits
    if len(truth.tokens) > 1:
        with engine.lock, torch.inference_mode():
            out = engine.model(input_ids=truth.tokens[None, :-1], past_key_values=cache, use_cache=True)
        logits = torch.cat((logits, out.logits[0]))
    return compare(truth, logits), report


def noise_floor(engine: TorchEngine, prompt: Prompt, truth: Reference) -> Fidelity:
    """Full prefill against itself: prompt and continuation in one pass, not step by step. Zero but for rounding."""
    ids = torch.cat((to_tensor(prompt.token_ids, engine.model.device), truth.tokens[:-1]))
    with engine.lock, torch.inference_mode():
        logits = engine.model(input_ids=ids[None], use_cache=False, logits_to_keep=len(truth.tokens)).logits[0]
    return compare(truth, logits)


def divergence(log_probs: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(full || mode) in nats by position: ``[tokens]`` float32 from full's log-probabilities and a mode's logits.

    At least zero: rounding can make it slightly less.
    """
    return (log_probs.exp() * (log_probs - logits.float().log_softmax(-1))).sum(-1).clamp_(min=0.0)


def agreement(log_probs: torch.Tensor, logits: torch.Tensor) -> float:
    """Share of positions with the same most likely token."""
    return float((logits.argmax(-1) == log_probs.argmax(-1)).float().mean())


def compare(truth: Reference, logits: torch.Tensor) -> Fidelity:
    """Fidelity of ``logits`` ``[tokens, vocab]`` to the reference."""
    return Fidelity(float(divergence(truth.log_probs, logits).mean()), agreement(truth.log_probs, logits))
