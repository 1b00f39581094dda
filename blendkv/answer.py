"""Answers: text with its sources, stage times and what the blend did; whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from blendkv.blend import BlendReport
from blendkv.retrieval.retriever import RetrievedChunk


@dataclass(frozen=True)
class Answer:
    """What a question got.

    ``timings`` holds seconds by stage (``retrieve``, ``prepare``, the blend's ``score``, ``load``, ``rotate`` and
    ``recompute``, and ``question``: from the end of the blend, or of the preparation, to the first token), and the sums
    ``ttft`` (from the call to the first token) and ``total``. ``blend_report`` is None for full prefill; ``fallback``
    says why a blend that was asked for became a full prefill.
    """

    text: str
    sources: tuple[RetrievedChunk, ...]
    mode: str
    timings: dict[str, float]
    blend_report: BlendReport | None = None
    fallback: str | None = None
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    token_ids: tuple[int, ...] = field(default=(), repr=False)


class AnswerStream:
    """Iterate for pieces of text as they are decoded; then ``answer`` holds the whole.

    Closing it early, or leaving a ``for`` loop over it and dropping it, ends the decoding.
    """

    def __init__(self, pieces: Iterator[str], finish: Callable[[], Answer]) -> None:
        self._pieces = pieces
        self._finish = finish
        self._answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        yield from self._pieces

    @property
    def answer(self) -> Answer:
        """The whole answer; what is not read yet is read first."""
        if self._answer is None:
            for _ in self._pieces:
                pass
            self._answer = self._finish()
        return self._answer
