"""Conversations: each turn sends the whole of it; what an engine holds of that already is not computed again."""

from __future__ import annotations

import time
from typing import Any, Protocol

from blendkv.answer import Answer, AnswerStream
from blendkv.blend import Mode
from blendkv.engines.base import Engine, GenerationOptions
from blendkv.market.base import Use
from blendkv.market.context import using
from blendkv.prompt import PromptBuilder
from blendkv.retrieval.retriever import Retriever
from blendkv.types import Prompt, Segment, as_token_ids


class Answers(Protocol):
    """What a conversation asks of a pipeline."""

    @property
    def engine(self) -> Engine:
        """The engine, which keeps what it computed of the history."""

    @property
    def retriever(self) -> Retriever:
        """Finds the chunks of a turn."""

    @property
    def prompts(self) -> PromptBuilder:
        """Builds the prompt of a turn."""

    def answer(self, prompt: Prompt, mode: Mode, *args: Any, **options: Any) -> AnswerStream:
        """Blend and decode; see `blendkv.pipeline.RagPipeline.answer`."""


class ChatSession:
    """One conversation. Each turn retrieves; chunks that an earlier turn brought in are not repeated.

    The embedded engine blends and runs new tokens only; vLLM finds earlier turns in its prefix cache. One thread.

    Attributes
    ----------
    answers
        The answers so far.
    """

    def __init__(self, pipeline: Answers, mode: Mode, k: int, use: Use) -> None:
        self.answers: list[Answer] = []
        self._use = use
        self._pipeline, self._mode, self._k = pipeline, mode, k
        self._seen: set[str] = set()
        self._earlier: tuple[Segment, ...] = ()
        self._conversation = pipeline.engine.conversation()

    @property
    def session(self) -> str:
        """What ties the turns together for the store's policy; hints name it (`RagPipeline.hint`)."""
        return self._use.session

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
        turn = (pipeline.prompts.next if self._earlier else pipeline.prompts.first)(
            [s.chunk.token_ids for s in fresh], question
        )
        prompt = Prompt((*self._earlier, *turn.segments))
        with using(self._use):
            stream: AnswerStream = pipeline.answer(
                prompt, self._mode, found, options, began=began, timings={"retrieve": retrieved},
                conversation=self._conversation,
            )  # fmt: skip
            answer = stream.answer
        self._remember(prompt, answer)
        self._seen.update(s.chunk.id for s in fresh)
        self.answers.append(answer)
        return answer

    def _remember(self, prompt: Prompt, answer: Answer) -> None:
        """Append the turn; the end-of-turn token belongs to the next prompt, which the template opens with it."""
        question = Segment("history", prompt.segments[-1].token_ids)
        said = as_token_ids(self._said(answer))
        self._earlier = (*prompt.segments[:-1], question, *([Segment("history", said)] if len(said) else []))

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
