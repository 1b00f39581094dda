"""The device check's blend: a Llama of random weights, blended by the engine's own code, against its full prefill."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from blendkv.blend import BlendReport, BlendSettings, blend
from blendkv.engines.torch.cache import ContiguousCache
from blendkv.engines.torch.runner import TorchRunner
from blendkv.eval.bench.device_kernels import Plan, seconds
from blendkv.kernels import testing
from blendkv.store.base import ChunkReader
from blendkv.types import ChunkKV, Prompt, Recipe, Segment, as_token_ids, to_tensor

CHUNK = 512
EDGE = 32
"""Tokens of the system message, and of the question."""
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


@dataclass(frozen=True)
class BlendPlan:
    """What is blended: the model's sizes, prompts in tokens, and mode by mode selector and budget."""

    config: Mapping[str, Any] = field(default_factory=lambda: LLAMA_8B)
    sizes: tuple[int, ...] = (8192, 32768)
    modes: tuple[tuple[str, float], ...] = (
        ("strided", 0.03), ("strided", 0.05), ("head_query", 0.03), ("head_query", 0.05),
    )  # fmt: skip
    chunk: int = CHUNK


class _Source:
    """`KVSource` of chunk KVs that lie on the device."""

    def __init__(self, stored: Sequence[ChunkKV | None]) -> None:
        self._stored = stored
        self.readers: Sequence[ChunkReader | None] = stored

    def layer(self, index: int) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """See `blendkv.engines.base.KVSource`."""
        return [None if kv is None else kv.layer(index) for kv in self._stored]


def model_of(config: Mapping[str, Any], device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Random weights, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        form = LlamaConfig(**config)
        return AutoModelForCausalLM.from_config(form, dtype=dtype, attn_implementation="sdpa").eval()


def _prompt(runner: TorchRunner, size: int, chunk: int) -> tuple[Prompt, _Source]:
    """System, chunks and question of random tokens; random K and V of the chunks, none of them exact here."""
    rng = random.Random(size)
    lengths = [EDGE, *[chunk] * ((size - 2 * EDGE) // chunk), EDGE]
    vocab = runner.config.vocab_size
    ids = [as_token_ids([rng.randrange(3, vocab) for _ in range(n)]) for n in lengths]
    kinds = ["system", *["chunk"] * (len(ids) - 2), "query"]
    segments = tuple(Segment(kind, own) for kind, own in zip(kinds, ids, strict=True))  # type: ignore[arg-type]
    stored: list[ChunkKV | None] = [None] * len(ids)
    recipe = Recipe("bos", (1,), str(runner.dtype).removeprefix("torch."))
    for place, own in enumerate(ids[1:-1], 1):
        k, v = (
            tuple(
                torch.randn(len(own), s.kv_heads, width, device=runner.device, dtype=runner.dtype)
                for s, width in ((s, getattr(s, name)) for s in runner.layers)
            )
            for name in ("head_dim", "v_head_dim")
        )
        stored[place] = ChunkKV("device-check", recipe, own, k, v)
    return Prompt(segments), _Source(stored)


class _Subject:
    """One model and one prompt, ready to be prefilled or blended."""

    def __init__(self, runner: TorchRunner, size: int, chunk: int) -> None:
        self.runner = runner
        self.prompt, self.source = _prompt(runner, size, chunk)
        self.sink = ContiguousCache(runner.layers, len(self.prompt), runner.dtype, runner.device)
        self.ids = to_tensor(self.prompt.token_ids, runner.device)[None]

    def full(self, keep: int = 1) -> torch.Tensor:
        """Full prefill by the model's own attention, in torch's flash kernel; KV kept."""
        with torch.inference_mode(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return self.runner.model(input_ids=self.ids, use_cache=True, logits_to_keep=keep).logits[0]

    def blend(self, selector: str, budget: float, keep: int = 1) -> BlendReport:
        """A blend into a cache whose memory is there already."""
        self.sink.crop_to(0)
        settings = BlendSettings(selector, budget)
        return blend(self.runner, self.prompt, self.source, self.sink, settings, keep)


def check_blend(config: Mapping[str, Any], device: str, dtype: torch.dtype, size: int = 3 * CHUNK) -> dict[str, float]:
    """Two layers: relative difference of the question's logits to full prefill, at budget 1 and, as a control, at 0."""
    small = {**config, "num_hidden_layers": 2, "initializer_range": 0.05}
    subject = _Subject(TorchRunner(model_of(small, device, dtype)), size, size // 3)
    full = subject.full(EDGE).float()
    found = {}
    for name, budget in (("budget 1", 1.0), ("budget 0", 0.0)):
        logits = subject.blend("strided", budget, EDGE).logits
        assert logits is not None
        found[name] = float((logits.float() - full).norm() / full.norm())
    return found


def blend_rows(plan: Plan, own: BlendPlan, backends: Sequence[str], dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Full prefill and every mode, at every size, by each of ``backends``."""
    with testing.forced(backends[0]):
        runner = TorchRunner(model_of(own.config, plan.device, dtype))
    for size in own.sizes:
        subject = _Subject(runner, size, own.chunk)
        whole = seconds(subject.full, plan)
        for backend in backends:
            for selector, budget in own.modes:
                with testing.forced(backend):
                    report = subject.blend(selector, budget)
                    took = seconds(partial(subject.blend, selector, budget), plan)
                yield {
                    "what": f"blend of {len(subject.prompt)} tokens, {selector}@{budget:g}", "ours": backend,
                    "ms": took * 1e3, "theirs": "full prefill, flash", "their_ms": whole * 1e3,
                    "speed_up": whole / took, "recomputed": report.recomputed_tokens,
                    "stages_ms": {name: s * 1e3 for name, s in report.stages.items()},
                }  # fmt: skip
