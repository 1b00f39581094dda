"""How far a blend is from full prefill, layer by layer: its K and V, and the attention that the question gets."""

from __future__ import annotations

import torch

from blendkv.engines.base import ModelRunner
from blendkv.engines.torch.cache import ContiguousCache
from blendkv.kernels import AttentionParams, selected_attention
from blendkv.types import Prompt, to_tensor


class _Listening:
    """Attends over a finished cache, writes nothing, and keeps each layer's attention output."""

    def __init__(self, cache: ContiguousCache, rows: torch.Tensor, total: int) -> None:
        self._cache, self._rows, self._total = cache, rows, total
        self.outputs: list[torch.Tensor] = []

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend the rows over what the cache holds of them and of all before them."""
        keys, values = self._cache.buffer(layer, self._total)
        out = selected_attention(q, keys, values, self._rows, params).out
        self.outputs.append(out.float())
        return out


def deviation_of(
    runner: ModelRunner, prompt: Prompt, blended: ContiguousCache, full: ContiguousCache
) -> dict[str, list[float]]:
    """Relative deviation |blend - full| / |full| (Frobenius norms) by layer.

    ``k`` and ``v`` are over the chunks' tokens, K rotated; ``attention`` is the output of the attention layers for the
    question's rows, which deviates by the KV of its own layer and by all that came before (the attention deviation of
    CacheBlend, arXiv 2405.16444, is on the attention matrix instead).
    """
    total, start = len(prompt), 0
    chunks = torch.zeros(total, dtype=torch.bool)
    for segment in prompt.segments:
        stop = start + len(segment.token_ids)
        chunks[start:stop] = segment.kind == "chunk"
        start = stop
    found: dict[str, list[float]] = {"k": [], "v": [], "attention": []}
    for index in range(len(runner.layers)):
        for name, ours, theirs in zip(("k", "v"), blended.buffer(index, total), full.buffer(index, total), strict=True):
            found[name].append(_relative(ours[chunks].float(), theirs[chunks].float()))
    rows = torch.arange(total - len(prompt.segments[-1].token_ids), total, device=runner.device)
    ids = to_tensor(prompt.token_ids, runner.device)[rows]
    sides = [_Listening(cache, rows, total) for cache in (blended, full)]
    for side in sides:
        runner.forward(ids, rows, side)
    found["attention"] = [_relative(a, b) for a, b in zip(sides[0].outputs, sides[1].outputs, strict=True)]
    return found


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    norm = float(theirs.norm())
    return float((ours - theirs).norm()) / norm if norm > 0 else 0.0
