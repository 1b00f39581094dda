"""The embedded engine: a transformers model that prefills, blends and decodes in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from blendkv.blend import BlendReport, BlendSettings, blend, collect
from blendkv.engines.base import GenerationOptions, KVSource
from blendkv.engines.fingerprint import fingerprint_folder, fingerprint_model
from blendkv.engines.torch.cache import ContiguousCache
from blendkv.engines.torch.decode import Decoder
from blendkv.engines.torch.load import load_model, resolve_folder
from blendkv.engines.torch.runner import TorchRunner, context_of
from blendkv.errors import ModelLoadError, PromptTooLongError, UnsupportedModelError
from blendkv.types import ChunkKV, Prompt, Recipe, TokenIds, to_tensor


class TorchEngine:
    """A causal transformers model with its tokenizer.

    ``unsupported`` holds the reason when the model cannot be blended; full prefill still works. Threads may share an
    engine: ``lock`` is held while the model runs.
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
        return cls(loaded, tokenizer, name=model, fingerprint=fingerprint_folder(folder))

    @property
    def dtype(self) -> str:
        """Name of the dtype of weights and KV, such as ``bfloat16``."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        own = self.model.generation_config.eos_token_id
        own = self.tokenizer.eos_token_id if own is None else own
        return frozenset(own if isinstance(own, list) else [] if own is None else [own])

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
        size = torch.empty(0, dtype=self.model.dtype).element_size()
        return sum(spec.kv_bytes(size) for spec in self.runner.layers)

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
        with self.lock:
            return blend(self.runner, prompt, source, cache, settings, logits_to_keep)

    def decoder(self, token_ids: TokenIds, cache: ContiguousCache | None, options: GenerationOptions) -> Decoder:
        """Decode behind ``token_ids``, the whole context; ``cache`` holds the KV of all of it, None means full prefill.

        The last token is run once more, by the model's own attention, for the first token's logits.

        Raises
        ------
        PromptTooLongError
            If the context leaves no room for the first new token.
        """
        room = self.context - len(token_ids)
        if room < 1:
            raise PromptTooLongError(
                f"prompt has {len(token_ids)} tokens; the model's context holds {self.context} with the answer: "
                "use fewer or smaller chunks"
            )
        if cache is not None:
            cache.crop_to(len(token_ids) - 1)
        allowed = GenerationOptions(
            min(options.max_new_tokens, room), options.temperature, options.top_p, options.stop, options.seed
        )
        return Decoder(self.model, self.tokenizer, to_tensor(token_ids, self.model.device), cache, allowed, self.lock)
