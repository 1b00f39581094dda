"""Answers: text with its sources, stage times and what the blend did; whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from blendkv.blend import BlendSummary
from blendkv.blend.loading import LoadPlan
from blendkv.engines.generation import Generation
from blendkv.retrieval.retriever import RetrievedChunk


@dataclass(frozen=True)
class Answer:
    """What a question got.

    ``timings`` holds seconds by stage (``retrieve``, ``prepare``, the blend's ``score``, ``load``, ``rotate`` and
    ``recompute``, and ``question``: the rest of the time to the first token), and the sums ``ttft`` (from the call to
    the first token) and ``total``. ``mode`` says what was done: the mode spec, ``full``, or ``prefix`` (vLLM's prefix
    cache held most of the prompt's KV from an earlier request with the same settings, blended if that one was).
    ``blend_report`` is None without a blend; ``fallback`` says why a blend that was asked for became something else.
    ``finish_reason`` is ``stop``, ``length`` or ``cancelled``; ``token_ids`` include the token that ended the answer.
    ``plan`` is the loading planner's, with the seconds that it predicted; None without one.
    """

    text: str
    sources: tuple[RetrievedChunk, ...]
    mode: str
    timings: dict[str, float]
    blend_report: BlendSummary | None = None
    fallback: str | None = None
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    plan: LoadPlan | None = None


class AnswerStream:
    """Iterate, with ``for`` or ``async for``, for pieces of text as they are decoded; then ``answer`` holds the whole.

    `close`, or leaving a ``for`` loop over it, ends the decoding; ``answer`` then holds what there is.
    """

    def __init__(self, generation: Generation, finish: Callable[[], Answer]) -> None:
        self._generation, self._finish = generation, finish
        self._pieces: Generator[str, None, None] | None = None
        self._over = False
        self._answer: Answer | None = None

    def _reading(self) -> Generator[str, None, None]:
        if self._pieces is None:
            self._pieces = iter(self._generation)
        return self._pieces

    def __iter__(self) -> Iterator[str]:
        yield from self._reading()
        _ = self.answer

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        pieces = aiter(self._generation)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()
            self._over = True
        _ = self.answer

    def close(self) -> None:
        """Stop decoding; any thread may do so."""
        self._generation.cancel()
        if self._pieces is None:
            self._over = True
        else:
            with suppress(ValueError):  # another thread is reading, and sees their end
                self._pieces.close()

    @property
    def answer(self) -> Answer:
        """The whole answer; what is not read yet is read first."""
        if self._answer is None:
            if not self._over:
                for _ in self._reading():
                    pass
            self._answer = self._finish()
        return self._answer
