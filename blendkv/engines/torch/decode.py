"""Decoding through transformers' ``generate``: token stream, stop strings, cancellation, time to first token."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from blendkv.engines.base import GenerationOptions

_DONE = object()


class _Tap(BaseStreamer):
    """Receives token ids from ``generate`` as they come, the prompt's first."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token = on_token
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Called by ``generate``: once with the prompt, then with each new token."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.reshape(-1).tolist():
            self._on_token(token)

    def end(self) -> None:
        """Nothing is buffered here."""


class _Cancelled(StoppingCriteria):
    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._event.is_set(), dtype=torch.bool, device=input_ids.device)


class Decoder:
    """One answer in flight. Iterate for text pieces; afterwards ``tokens``, ``first_token_at`` and ``text`` are known.

    Parameters
    ----------
    model, tokenizer
        Of the engine.
    token_ids
        The whole prompt, int64 ``[tokens]``.
    cache
        KV of all but the last token of the prompt, or None for a plain prefill.
    options
        How to decode.
    lock
        The engine's, held while the model runs.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        token_ids: torch.Tensor,
        cache: Any,
        options: GenerationOptions,
        lock: threading.Lock,
    ) -> None:
        self.tokens: list[int] = []
        self.first_token_at: float | None = None
        self.finish_reason = "length"
        self.text = ""
        self._model, self._tokenizer, self._options = model, tokenizer, options
        self._ids, self._cache, self._lock = token_ids, cache, lock
        self._special = set(tokenizer.all_special_ids)
        self._cancel = threading.Event()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def _config(self) -> GenerationConfig:
        own = self._model.generation_config
        sampling = self._options.temperature > 0.0
        return GenerationConfig(
            max_new_tokens=self._options.max_new_tokens,
            do_sample=sampling,
            temperature=self._options.temperature if sampling else None,
            top_p=self._options.top_p if sampling else None,
            top_k=0 if sampling else None,
            bos_token_id=own.bos_token_id,
            eos_token_id=own.eos_token_id if own.eos_token_id is not None else self._tokenizer.eos_token_id,
            pad_token_id=own.pad_token_id if own.pad_token_id is not None else 0,
        )

    def _received(self, token: int) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.tokens.append(token)
        self._queue.put(token)

    def _generate(self) -> None:
        try:
            extra: dict[str, Any] = {}
            if self._cache is not None:
                extra["past_key_values"] = self._cache
            if self._options.stop:
                extra |= {"stop_strings": list(self._options.stop), "tokenizer": self._tokenizer}
            with self._lock, torch.inference_mode():
                if self._options.seed is not None:
                    torch.manual_seed(self._options.seed)
                self._model.generate(
                    self._ids[None],
                    attention_mask=torch.ones_like(self._ids[None]),
                    generation_config=self._config(),
                    streamer=_Tap(self._received),
                    stopping_criteria=StoppingCriteriaList([_Cancelled(self._cancel)]),
                    **extra,
                )
            self._queue.put(_DONE)
        except BaseException as error:
            self._queue.put(error)

    def __iter__(self) -> Iterator[str]:
        worker = threading.Thread(target=self._generate, name="blendkv-decode", daemon=True)
        worker.start()
        cutter = StopCutter(self._options.stop)
        shown = ""
        try:
            while (item := self._queue.get()) is not _DONE:
                if isinstance(item, BaseException):
                    raise item
                decoded = self._decoded()
                if decoded.endswith("\N{REPLACEMENT CHARACTER}"):
                    continue  # a character whose bytes are not all here yet
                piece = cutter.push(decoded[len(shown) :])
                shown = decoded
                if piece:
                    self.text += piece
                    yield piece
            if rest := cutter.push(self._decoded()[len(shown) :]) + cutter.flush():
                self.text += rest
                yield rest
            ended = cutter.cut or (self.tokens and len(self.tokens) < self._options.max_new_tokens)
            self.finish_reason = "stop" if ended or self._ends_with_eos() else "length"
        finally:
            self._cancel.set()
            worker.join()

    def _ends_with_eos(self) -> bool:
        eos = self._config().eos_token_id
        return bool(self.tokens) and self.tokens[-1] in (eos if isinstance(eos, list) else [eos])

    def _decoded(self) -> str:
        kept = [t for t in self.tokens if t not in self._special]
        return str(self._tokenizer.decode(kept, clean_up_tokenization_spaces=False))


class StopCutter:
    """Passes text on until a stop string begins; holds back what may turn out to be one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.cut = False

    def push(self, text: str) -> str:
        """Add ``text`` and return what can be shown."""
        if self.cut:
            return ""
        self._held += text
        found = [at for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            self.cut = True
            return self._take(min(found))
        keep = max((n for s in self._stops for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        return self._take(len(self._held) - keep)

    def flush(self) -> str:
        """The rest, at the end of the text."""
        return "" if self.cut else self._take(len(self._held))

    def _take(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        return shown
