"""The embedded engine: a transformers model that prefills, blends and decodes in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blendkv.blend import BlendReport, BlendSettings, Mode, blend, collect
from blendkv.blend.loading import LoadingPlanner, LoadPlan
from blendkv.blend.planned import PlannedBlend
from blendkv.daemon.pinning import pin_for
from blendkv.engines.base import (
    Conversation,
    GenerationOptions,
    KVSource,
    Outcome,
    check_room,
    kv_bytes_per_token,
)
from blendkv.engines.fingerprint import fingerprint_folder, fingerprint_model
from blendkv.engines.folders import model_name, resolve_folder
from blendkv.engines.torch.cache import ContiguousCache
from blendkv.engines.torch.conversation import TorchConversation
from blendkv.engines.torch.decode import Decoder, end_token_ids
from blendkv.engines.torch.load import load_model
from blendkv.engines.torch.runner import TorchRunner, context_of
from blendkv.errors import DamagedChunkError, ModelLoadError, UnavailableChunkError, UnsupportedModelError
from blendkv.library import ChunkLibrary, Library
from blendkv.observe.tracing import span
from blendkv.store.codecs import RAW
from blendkv.store.door import Store
from blendkv.types import ChunkKV, Prompt, Recipe, RecipeKind, TokenIds, to_tensor

_DAMAGED, _GONE = "damaged chunk recomputed", "chunk of a store that went away recomputed"
_NO_END = "chunk KVs are damaged again and again while they are read: check the disk of the store"


class TorchEngine:
    """A causal transformers model with its tokenizer.

    ``unsupported`` holds the reason when the model cannot be blended; full prefill still works. Threads may share an
    engine: ``lock`` is held while the model runs.

    ``planner`` decides which stored chunks `generate` loads and which it computes; None: all are loaded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "in-memory",
        fingerprint: str | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelLoadError(f"{name} has a slow tokenizer; BlendKV needs a fast one (tokenizer.json) for offsets")
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.lock = threading.Lock()
        self.planner: LoadingPlanner | None = None
        self._pins = False
        self.context = context_of(model.config.get_text_config(decoder=True))
        self.fingerprint = fingerprint or fingerprint_model(
            model, model.config.to_dict(), tokenizer.backend_tokenizer.to_str()
        )
        self.unsupported: UnsupportedModelError | None = None
        self._runner: TorchRunner | None = None
        try:
            self._runner = TorchRunner(model)
        except UnsupportedModelError as error:
            self.unsupported = error

    @classmethod
    def load(cls, model: str, *, dtype: str = "auto", device: str = "auto") -> TorchEngine:
        """Load ``model``: a local folder, a hub id, or ``demo``.

        Raises
        ------
        ModelLoadError, MissingDependencyError
            If it cannot be loaded.
        """
        folder = resolve_folder(model)
        loaded, tokenizer = load_model(folder, dtype, device)
        return cls(loaded, tokenizer, name=model_name(model, folder), fingerprint=fingerprint_folder(folder))

    @property
    def dtype(self) -> str:
        """Name of the dtype of weights and KV, such as ``bfloat16``."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def bos_token_id(self) -> int | None:
        """The tokenizer's BOS, if it has one."""
        return self.tokenizer.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return end_token_ids(self.model, self.tokenizer)

    @property
    def runner(self) -> TorchRunner:
        """The model under attention sessions.

        Raises
        ------
        UnsupportedModelError
            If the model cannot be blended, with the cause.
        """
        if self._runner is None:
            assert self.unsupported is not None
            raise self.unsupported
        return self._runner

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return kv_bytes_per_token(self.runner)

    def collect(self, recipe: Recipe, chunks: Sequence[TokenIds], prefix: ChunkKV | None) -> list[ChunkKV]:
        """Compute chunk KVs alone; see `blendkv.blend.collect`."""
        with self.lock, torch.inference_mode():
            return collect(self.runner, self.fingerprint, recipe, chunks, prefix)

    def new_cache(self, capacity: int) -> ContiguousCache:
        """An empty cache for ``capacity`` tokens; it grows when more are needed."""
        return ContiguousCache(self.runner.layers, capacity, self.model.dtype, self.model.device)

    def blend(
        self, prompt: Prompt, source: KVSource, cache: ContiguousCache, settings: BlendSettings, logits_to_keep: int = 0
    ) -> BlendReport:
        """Blend ``prompt`` behind what ``cache`` holds; see `blendkv.blend.blend`."""
        with self.lock, span("blend", tokens=len(prompt), budget_asked=settings.asked) as told:
            try:
                report = blend(self.runner, prompt, source, cache, settings, logits_to_keep)
            finally:
                if self._pins:  # copies from page-locked memory go on by themselves, and its owner may let go of it now
                    torch.cuda.synchronize(self.model.device)
            told.set(
                budget_spent=report.budget_spent, reusable_tokens=report.reusable_tokens,
                recomputed_tokens=report.recomputed_tokens, bytes=report.bytes_loaded,
            )  # fmt: skip
            return report

    def library(
        self,
        store: Store,
        kind: RecipeKind,
        system_prefix: TokenIds,
        codec: str | None = None,
        tenant: str = "",
    ) -> ChunkLibrary:
        """The chunk KVs of this engine in ``store``, raw unless a codec is named."""
        self._pins |= pin_for(store, self.model.device)
        return ChunkLibrary(self, store, kind, system_prefix, codec or RAW, tenant)

    def conversation(self) -> TorchConversation:
        """Start a conversation, whose history stays in a cache."""
        return TorchConversation(self)

    def close(self) -> None:
        """Nothing to do: the memory goes with the object."""

    def check_room(self, tokens: int, made_of: str = "") -> None:
        """Refuse a context of ``tokens`` that leaves no room for an answer; see `blendkv.engines.base.check_room`."""
        check_room(self, tokens, made_of)

    def generate(
        self,
        prompt: Prompt,
        mode: Mode,
        library: Library,
        options: GenerationOptions,
        conversation: Conversation | None = None,
    ) -> Decoder:
        """Blend now, and return the decoding; see `blendkv.engines.base.Engine.generate`."""
        began = time.perf_counter()
        assert isinstance(library, ChunkLibrary)
        assert conversation is None or isinstance(conversation, TorchConversation)
        outcome, report, cache = Outcome("full"), None, None
        if mode.settings is not None and self.unsupported is not None:
            outcome = Outcome("full", None, str(self.unsupported), ("unsupported model",))
        elif mode.settings is not None:
            conversation = conversation or TorchConversation(self, room=64)
            rest, cache = conversation.behind(prompt)
            report, plan, incidents = self._blend_whole(rest, library, cache, mode.settings)
            outcome = Outcome(str(mode), report, None, incidents, plan=plan)
            if report is None:
                outcome, cache = Outcome("full", None, _NO_END, (*outcome.incidents, "damaged again and again")), None
        decoder = self.decoder(prompt.token_ids, cache, options, None if report is None else report.logits)
        if conversation is not None and report is not None:
            conversation.blended(prompt, decoder)
        stages = {} if report is None else report.stages
        seconds = {"prepare": time.perf_counter() - began - sum(stages.values()), **stages}
        decoder.outcome = replace(outcome, seconds=seconds)
        return decoder

    def _blend_whole(
        self, prompt: Prompt, library: ChunkLibrary, cache: ContiguousCache, settings: BlendSettings
    ) -> tuple[BlendReport | None, LoadPlan | None, tuple[str, ...]]:
        """Blend; a chunk that turns out damaged is dropped, computed again, and the blend starts over.

        So it does for a chunk whose rest does not come, with which nothing is wrong. Returns the report, None when
        there is no end to it, the plan, and what happened.
        """
        incidents: tuple[str, ...] = ()
        for _ in range(len(prompt.segments) + 1):
            try:
                return *self._blend_once(prompt, library, cache, settings), incidents
            except UnavailableChunkError:
                incidents += (_GONE,)
            except DamagedChunkError as error:
                library.store.discard(error.key, error.reason)
                incidents += (_DAMAGED,)
        return None, None, incidents

    def _blend_once(
        self, prompt: Prompt, library: ChunkLibrary, cache: ContiguousCache, settings: BlendSettings
    ) -> tuple[BlendReport, LoadPlan | None]:
        if self.planner is None:
            with library.source(prompt) as source:
                return self.blend(prompt, source, cache, settings, logits_to_keep=1), None
        planned = PlannedBlend(self.planner, self.runner, prompt, settings, cache.length)
        with library.source(prompt, planned.readers) as source:
            report = self.blend(prompt, source, cache, planned.settings, logits_to_keep=1)
            planned.learn(report)
        return report, planned.plan

    def decoder(
        self,
        token_ids: TokenIds,
        cache: ContiguousCache | None,
        options: GenerationOptions,
        logits: torch.Tensor | None = None,
    ) -> Decoder:
        """Decode behind ``token_ids``, the whole context.

        ``cache`` and ``logits`` ``[1, vocab]`` are what a blend of all of it left; without them it is prefilled now.

        Raises
        ------
        PromptTooLongError
            If the context leaves no room for the first new token.
        """
        self.check_room(len(token_ids))
        allowed = GenerationOptions(
            min(options.max_new_tokens, self.context - len(token_ids)),
            options.temperature,
            options.top_p,
            options.stop,
            options.seed,
        )
        ids = to_tensor(token_ids, self.model.device)
        return Decoder(self.model, self.tokenizer, ids, cache, logits, allowed, self.lock)
