"""Conversations: the blended history stays in the engine's memory, later turns add to it."""

from __future__ import annotations

import time
from typing import Any, Protocol

from blendkv.answer import Answer, AnswerStream
from blendkv.blend import Mode
from blendkv.engines.base import GenerationOptions
from blendkv.engines.torch.cache import ContiguousCache
from blendkv.engines.torch.engine import TorchEngine
from blendkv.prompt import PromptBuilder
from blendkv.retrieval.retriever import Retriever
from blendkv.types import Prompt, Segment, TokenIds, as_token_ids


class Answers(Protocol):
    """What a conversation asks of a pipeline."""

    @property
    def engine(self) -> TorchEngine:
        """The engine, whose caches hold the history."""

    @property
    def retriever(self) -> Retriever:
        """Finds the chunks of a turn."""

    @property
    def prompts(self) -> PromptBuilder:
        """Builds the prompt of a turn."""

    def answer(self, prompt: Prompt, mode: Mode, *args: Any, **options: Any) -> AnswerStream:
        """Blend and decode behind a history; see `blendkv.pipeline.RagPipeline.answer`."""


class ChatSession:
    """One conversation. Each turn retrieves; chunks that an earlier turn brought in are not repeated.

    With full prefill every turn prefills the whole conversation again; blended turns run new tokens only. One thread.

    Attributes
    ----------
    answers
        The answers so far.
    """

    def __init__(self, pipeline: Answers, mode: Mode, k: int) -> None:
        self.answers: list[Answer] = []
        self._pipeline, self._mode, self._k = pipeline, mode, k
        self._seen: set[str] = set()
        self._tokens: TokenIds | None = None
        self._cache: ContiguousCache | None = None

    def ask(self, question: str, options: GenerationOptions | None = None) -> Answer:
        """Answer the next question.

        Raises
        ------
        PromptTooLongError
            If the conversation exceeds the model's context; the session stays as it was.
        """
        began = time.perf_counter()
        pipeline = self._pipeline
        found = pipeline.retriever.retrieve(question, self._k)
        retrieved = time.perf_counter() - began
        fresh = [s for s in found if s.chunk.id not in self._seen]
        chunks = [s.chunk.token_ids for s in fresh]
        history = self._tokens
        if history is None:
            prompt = pipeline.prompts.first(chunks, question)
        else:
            prompt = pipeline.prompts.next(chunks, question)
        if self._mode.settings is not None and pipeline.engine.unsupported is None:
            prompt, history = self._behind_cache(prompt)
        stream: AnswerStream = pipeline.answer(
            prompt, self._mode, found, options, began=began, timings={"retrieve": retrieved},
            history=history, cache=self._cache,
        )  # fmt: skip
        answer = stream.answer
        self._remember(prompt, history, answer)
        self._seen.update(s.chunk.id for s in fresh)
        self.answers.append(answer)
        return answer

    def _behind_cache(self, prompt: Prompt) -> tuple[Prompt, TokenIds | None]:
        """Put what the cache does not hold yet (the last token of the last answer) in front of the prompt."""
        if self._tokens is None:
            self._cache = self._pipeline.engine.new_cache(len(prompt) + 512)
            return prompt, None
        assert self._cache is not None
        self._cache.crop_to(len(self._tokens))
        held = self._cache.length
        tail = self._tokens[held:]
        if len(tail) == 0:
            return prompt, self._tokens
        return Prompt((Segment("history", as_token_ids(tail)), *prompt.segments)), as_token_ids(self._tokens[:held])

    def _remember(self, prompt: Prompt, history: TokenIds | None, answer: Answer) -> None:
        """Append the turn; the end-of-turn token belongs to the next prompt, which the template opens with it."""
        before = [] if history is None else history.tolist()
        self._tokens = as_token_ids([*before, *prompt.token_ids.tolist(), *self._said(answer)])

    def _said(self, answer: Answer) -> list[int]:
        """The answer's tokens, without the token or the stop string that ended it."""
        engine = self._pipeline.engine
        said = list(answer.token_ids)
        if answer.finish_reason != "stop":
            return said
        if said[-1] in engine.eos_token_ids:
            return said[:-1]

        def text() -> str:
            return str(engine.tokenizer.decode(said, skip_special_tokens=True))

        while len(text()) > len(answer.text):
            said.pop()
        return said + self._pipeline.prompts.encode(answer.text[len(text()) :], plain=True)
