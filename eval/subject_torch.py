"""The embedded engine as a subject: distributions and KV are compared in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from blendkv.blend import BlendReport, BlendSettings, Mode
from blendkv.engines.base import GenerationOptions
from blendkv.engines.torch.cache import ContiguousCache
from blendkv.engines.torch.engine import TorchEngine
from blendkv.eval.deviation import deviation_of
from blendkv.eval.fidelity import agreement, divergence
from blendkv.eval.modes import EvalMode, Sizes
from blendkv.eval.subject import CONTINUATION, Asked, Built, Comparison, Truth, offsets_by_chunk
from blendkv.library import ChunkLibrary
from blendkv.prompt import DEFAULT_SYSTEM, PromptBuilder
from blendkv.store.base import ChunkReader
from blendkv.store.codecs import RAW
from blendkv.store.door import Store
from blendkv.types import Prompt, RecipeKind, to_tensor

Through = Callable[[Sequence[ChunkReader | None]], list[ChunkReader | None]]
_NOTHING = BlendSettings("strided", 0.0, "off")
"""Recompute nothing that is stored."""


@dataclass
class _State:
    """Full prefill: its KV of the prompt, and its log-probabilities on the continuation and the gold answer."""

    cache: ContiguousCache
    continuation: torch.Tensor
    log_probs: torch.Tensor
    gold: torch.Tensor
    gold_log_probs: torch.Tensor


class TorchSubject:
    """See `blendkv.eval.subject.Subject`.

    Parameters
    ----------
    engine
        Its model can be blended.
    store
        Keeps the chunk KVs; closed with the subject.
    recipe, system, codec
        How chunks are computed, behind what, and how they are stored.

    Raises
    ------
    UnsupportedModelError
        If the model cannot be blended.
    InputError
        If the codec cannot be used with it.
    """

    engine_name = "torch"

    def __init__(
        self,
        engine: TorchEngine,
        store: Store,
        recipe: RecipeKind = "system",
        system: str = DEFAULT_SYSTEM,
        codec: str = RAW,
    ) -> None:
        self.engine = engine
        self.model, self.fingerprint, self.dtype = engine.name, engine.fingerprint, engine.dtype
        self.layers, self.context, self.tokenizer = len(engine.runner.layers), engine.context, engine.tokenizer
        self.builder = PromptBuilder(engine.tokenizer, system)
        self.library = ChunkLibrary(engine, store, recipe, self.builder.prefix, codec)
        self.codec = codec
        self._system = system
        self._others: dict[str, TorchSubject] = {codec: self}

    def stored_as(self, codec: str) -> TorchSubject:
        """The same engine and store with chunk KVs of another codec; close only one of them.

        Raises
        ------
        InputError
            If the codec cannot be used with the model.
        """
        if codec not in self._others:
            made = TorchSubject(self.engine, self.library.store, self.library.kind, self._system, codec)
            made._others = self._others
            self._others[codec] = made
        return self._others[codec]

    def prepare(self, built: Built) -> None:
        """Compute and store the chunk KVs of a prompt."""
        self.library.readers(built.prompt)

    def truth(self, built: Built) -> Truth:
        """Prefill in full, by the model's own attention, and answer greedily."""
        engine, length = self.engine, max(CONTINUATION, built.max_new_tokens)
        ids = to_tensor(built.prompt.token_ids, engine.model.device)
        cache = engine.new_cache(len(ids) + length)
        said: list[torch.Tensor] = []
        rows: list[torch.Tensor] = []
        with engine.lock, torch.inference_mode():
            logits = self._forward(ids, cache, 1)
            first = logits
            ended = -1
            while len(said) < CONTINUATION or (ended < 0 and len(said) < built.max_new_tokens):
                if len(rows) < CONTINUATION:
                    rows.append(logits[0].float().log_softmax(-1))
                said.append(logits[0].argmax())
                if ended < 0 and int(said[-1]) in engine.eos_token_ids:
                    ended = len(said)
                logits = self._forward(said[-1][None], cache, 1)
            cache.crop_to(len(ids))
            gold = to_tensor(built.gold, ids.device)
            gold_log_probs = self._forced(first, gold, cache).float().log_softmax(-1)
        answer = tuple(int(t) for t in said[: ended if ended > 0 else built.max_new_tokens])
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        continuation = torch.stack(said[:CONTINUATION])
        return Truth(answer, text, _State(cache, continuation, torch.stack(rows), gold, gold_log_probs))

    def _forward(self, ids: torch.Tensor, cache: ContiguousCache, keep: int) -> torch.Tensor:
        """Run ``ids`` ``[n]`` behind the cache by the model's own attention; logits ``[keep, vocab]``."""
        out = self.engine.model(input_ids=ids[None], past_key_values=cache, use_cache=True, logits_to_keep=keep)
        return out.logits[0]

    def _forced(self, first: torch.Tensor, tokens: torch.Tensor, cache: ContiguousCache) -> torch.Tensor:
        """Logits ``[len(tokens), vocab]`` of ``tokens`` behind the cache, which is left as it was."""
        if len(tokens) < 2:
            return first[: len(tokens)]
        length = cache.length
        logits = torch.cat((first, self._forward(tokens[:-1], cache, len(tokens) - 1)))
        cache.crop_to(length)
        return logits

    def _sizes(self, prompt: Prompt) -> Sizes:
        """Of a prompt whose chunks are all stored."""
        readers = self.library.readers(prompt)
        lengths = [len(s.token_ids) for s in prompt.segments if s.kind == "chunk"]
        behind_prefix = readers[0] is not None and self.library.kind == "system"
        return Sizes(lengths[1:] if behind_prefix else lengths, sum(lengths), self.layers)

    def mode_of(self, built: Built, mode: EvalMode) -> Mode:
        """The mode for this prompt, a baseline's budget worked out."""
        return mode.resolve(self._sizes(built.prompt))

    def _blend(
        self, built: Built, settings: BlendSettings, through: Through | None = None
    ) -> tuple[ContiguousCache, BlendReport]:
        """Blend into a new cache; ``through`` as for `blendkv.library.ChunkLibrary.source`."""
        cache = self.engine.new_cache(len(built.prompt) + built.max_new_tokens + CONTINUATION + len(built.gold))
        with self.library.source(built.prompt, through) as source:
            return cache, self.engine.blend(built.prompt, source, cache, settings, logits_to_keep=1)

    def compare(self, built: Built, mode: EvalMode, truth: Truth, deviation: bool = False) -> Comparison:
        """See `blendkv.eval.subject.Subject.compare`; full prefill is compared with itself run in one pass."""
        state: _State = truth.state
        if mode.exact and not mode.prefix:
            return self._rounding(built, state)
        through = _exact_head(built.prompt) if mode.prefix else None
        cache, done = self._blend(built, self.mode_of(built, mode).settings or _NOTHING, through)
        assert done.logits is not None
        with self.engine.lock, torch.inference_mode():
            continued = self._forced(done.logits, state.continuation, cache)
            gold = self._forced(done.logits, state.gold, cache)
        report = None if mode.prefix else done
        layers = None
        if deviation and report is not None:
            with self.engine.lock, torch.inference_mode():
                layers = deviation_of(self.engine.runner, built.prompt, cache, state.cache)
        selected = None if report is None else offsets_by_chunk(built.prompt, report.selected.tolist())
        return _compared(state, continued, gold, report, selected, layers)

    def _rounding(self, built: Built, state: _State) -> Comparison:
        """Full prefill with its continuation in one pass, and step by step: the same but for rounding."""
        ids = torch.cat((to_tensor(built.prompt.token_ids, self.engine.model.device), state.continuation[:-1]))
        with self.engine.lock, torch.inference_mode():
            out = self.engine.model(input_ids=ids[None], use_cache=False, logits_to_keep=len(state.continuation))
        return _compared(state, out.logits[0], None, None, None, None)

    def budget_one(self, built: Built, truth: Truth) -> float:
        """KL to full prefill with every token recomputed."""
        state: _State = truth.state
        cache, report = self._blend(built, BlendSettings("strided", 1.0), _without_losses(built.prompt))
        assert report.logits is not None
        with self.engine.lock, torch.inference_mode():
            continued = self._forced(report.logits, state.continuation, cache)
        return float(divergence(state.log_probs, continued).mean())

    def ask(self, built: Built, mode: EvalMode, max_new_tokens: int) -> Asked:
        """See `blendkv.eval.subject.Subject.ask`; ``prefix`` takes system prefix and first chunk from the store."""
        prompt, options = built.prompt, GenerationOptions(max_new_tokens=max_new_tokens)
        if mode.prefix:
            began = time.perf_counter()
            cache, head = self._blend(built, _NOTHING, _exact_head(prompt))
            generation = self.engine.decoder(prompt.token_ids, cache, options, head.logits)
        else:
            asked = self.mode_of(built, mode)
            began = time.perf_counter()
            generation = self.engine.generate(prompt, asked, self.library, options)
        for _ in generation:
            pass
        assert generation.first_token_at is not None
        done, ttft = generation.outcome, generation.first_token_at - began
        stages = dict(done.report.stages) if done.report is not None else {}
        if stages:
            stages["question"] = max(0.0, ttft - sum(stages.values()))
        predicted = None if done.plan is None or done.plan.predicted is None else dict(done.plan.predicted)
        return Asked(tuple(generation.tokens), generation.text, ttft, stages, done.report, done.fallback, predicted)

    def close(self) -> None:
        """Close the store; the model goes with the object."""
        self.library.store.close()


def _without_losses(prompt: Prompt) -> Through:
    """Leave out what no budget recomputes although its codec changed it: a chunk that is exact where it stands."""
    head = _exact_head(prompt)

    def through(readers: Sequence[ChunkReader | None]) -> list[ChunkReader | None]:
        kept = head(readers)
        return [None if r is not None and r is k and r.recipe.codec != RAW else r
                for r, k in zip(readers, kept, strict=True)]  # fmt: skip

    return through


def _exact_head(prompt: Prompt) -> Through:
    """Keep the readers of what an exact prefix cache can hold of a prompt: KV computed behind the very same tokens."""

    def through(readers: Sequence[ChunkReader | None]) -> list[ChunkReader | None]:
        kept: list[ChunkReader | None] = []
        start = 0
        for segment, reader in zip(prompt.segments, readers, strict=True):
            before = () if reader is None else reader.recipe.prefix
            same = len(before) == start and np.array_equal(prompt.token_ids[:start], before)
            kept.append(reader if same else None)
            start += len(segment.token_ids)
        return kept

    return through


def _compared(
    state: _State,
    continued: torch.Tensor,
    gold: torch.Tensor | None,
    report: BlendReport | None,
    selected: Sequence[list[int]] | None,
    deviation: dict[str, list[float]] | None,
) -> Comparison:
    kl = divergence(state.log_probs, continued)
    on_gold = None if gold is None else float(divergence(state.gold_log_probs, gold).mean())
    top1 = agreement(state.log_probs, continued)
    chosen = None if selected is None else list(selected)
    return Comparison(float(kl.mean()), float(kl[0]), on_gold, top1, report, chosen, deviation)
