"""Decoding through transformers' ``generate``: token stream, stop strings, cancellation, time to first token."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from blendkv.engines.base import GenerationOptions, Outcome
from blendkv.engines.generation import End, Generation
from blendkv.observe.tracing import carried, span


class _Watch(StoppingCriteria):
    """Hands each new token on and ends the decoding when told so.

    A streamer would hear of a token only after the decision whether to go on behind it.
    """

    def __init__(self, on_token: Callable[[int], bool]) -> None:
        self._on_token = on_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        ended = self._on_token(int(input_ids[0, -1]))
        return torch.full((1,), ended, dtype=torch.bool, device=input_ids.device)


class Decoder(Generation):
    """One answer in flight, decoded in a thread of its own.

    Parameters
    ----------
    model, tokenizer
        Of the engine.
    token_ids
        The whole prompt, int64 ``[tokens]``.
    cache, logits
        KV of the prompt and the logits behind it, ``[1, vocab]``; None for a plain prefill.
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
        logits: torch.Tensor | None,
        options: GenerationOptions,
        lock: threading.Lock,
    ) -> None:
        super().__init__(Outcome("full"))
        self._model, self._options = model, options
        self._ids, self._cache, self._logits, self._lock = token_ids, cache, logits, lock
        self._eos = end_token_ids(model, tokenizer)
        self._output = TextOutput(tokenizer, options.stop)
        self._cancel = threading.Event()
        self._work = carried(self._generate)
        self._put: Callable[[Any], None] = lambda item: None
        self._worker: threading.Thread | None = None

    def _config(self) -> GenerationConfig:
        own = self._model.generation_config
        sampling = self._options.temperature > 0.0
        return GenerationConfig(
            max_new_tokens=self._options.max_new_tokens,
            do_sample=sampling,
            temperature=self._options.temperature if sampling else 1.0,
            top_p=self._options.top_p if sampling else 1.0,
            top_k=0 if sampling else 50,  # without sampling: transformers' own default, which it does not warn of
            bos_token_id=own.bos_token_id,
            eos_token_id=sorted(self._eos) or None,
            pad_token_id=own.pad_token_id if own.pad_token_id is not None else 0,
        )

    def _received(self, token: int) -> bool:
        """Take a token; return whether it is the last one."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.tokens.append(token)
        self._put(self._output.push(token))
        return self._output.stopped or self._cancel.is_set()

    def _generate(self) -> None:
        try:
            extra = {}
            if self._cache is not None and self._logits is not None:
                extra = {"past_key_values": self._cache, "custom_generate": _behind(self._cache, self._logits)}
            with self._lock, torch.inference_mode(), span("decode", prompt_tokens=len(self._ids)) as told:
                if self._options.seed is not None:
                    torch.manual_seed(self._options.seed)
                self._model.generate(
                    self._ids[None],
                    attention_mask=torch.ones_like(self._ids[None]),
                    generation_config=self._config(),
                    stopping_criteria=StoppingCriteriaList([_Watch(self._received)]),
                    **extra,
                )
                told.set(tokens=len(self.tokens))
            self._put(self._output.flush())
            self._put(End(self._ended()))
        except BaseException as error:
            self._put(error)

    def _ended(self) -> str:
        """Why the decoding ended."""
        if self._output.stopped or self.tokens[-1] in self._eos:
            return "stop"
        return "cancelled" if self._cancel.is_set() else "length"

    def _start(self, put: Callable[[Any], None]) -> None:
        self._put = put
        self._worker = threading.Thread(target=self._work, name="blendkv-decode", daemon=True)
        self._worker.start()

    def cancel(self) -> None:
        """Stop behind the token that is being decoded."""
        self._cancel.set()

    def _join(self) -> None:
        if self._worker is not None:
            self._worker.join()


def _behind(cache: Any, logits: torch.Tensor) -> Callable[..., torch.Tensor]:
    """``generate``'s decoding method behind a context whose KV is in ``cache`` and whose next logits are known.

    ``generate`` itself would run the context's last token a second time for them.
    """

    def decode(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        row = logits
        while True:
            scores = logits_processor(input_ids, row.float())
            if generation_config.do_sample:
                token = torch.multinomial(scores.softmax(-1), 1)
            else:
                token = scores.argmax(-1, keepdim=True)
            input_ids = torch.cat((input_ids, token), -1)
            if bool(stopping_criteria(input_ids, None).all()):
                return input_ids
            row = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]

    return decode


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end an answer: the model's own, or else the tokenizer's."""
    own = model.generation_config.eos_token_id
    own = tokenizer.eos_token_id if own is None else own
    return frozenset(own if isinstance(own, list) else [] if own is None else [own])


class TextOutput:
    """Turns tokens into text as they come: whole characters, without special tokens, up to a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)
        self._cutter = StopCutter(stops)
        self._tokens: list[int] = []
        self._passed = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._cutter.cut

    def push(self, token: int) -> str:
        """Add a token and return what can be shown; the bytes of a character that is not whole yet are held back."""
        if token not in self._special:
            self._tokens.append(token)
        return self._pass_on(self._text().rstrip("\N{REPLACEMENT CHARACTER}"))

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        return self._pass_on(self._text()) + self._cutter.flush()

    def _pass_on(self, text: str) -> str:
        piece = self._cutter.push(text[len(self._passed) :])
        self._passed = text
        return piece

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._tokens, clean_up_tokenization_spaces=False))


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
        found = [(at + len(s), at) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:  # the one that ends first counts, however the text was cut into pieces
            self.cut = True
            return self._take(min(found)[1])
        keep = max((n for s in self._stops for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        return self._take(len(self._held) - keep)

    def flush(self) -> str:
        """The rest, at the end of the text."""
        return "" if self.cut else self._take(len(self._held))

    def _take(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        return shown
