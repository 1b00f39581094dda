"""Answers: text with its sources, stage times and what the blend did; whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from blendkv.blend import BlendReport
from blendkv.retrieval.retriever import RetrievedChunk


@dataclass(frozen=True)
class Answer:
    """What a question got.

    ``timings`` holds seconds by stage (``retrieve``, ``prepare``, the blend's ``score``, ``load``, ``rotate`` and
    ``recompute``, and ``question``: from the end of the blend, or of the preparation, to the first token), and the sums
    ``ttft`` (from the call to the first token) and ``total``. ``blend_report`` is None for full prefill; ``fallback``
    says why a blend that was asked for became a full prefill. ``finish_reason`` is ``stop``, ``length`` or
    ``cancelled``; ``token_ids`` include the token that ended the answer.
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

    `close`, or leaving a ``for`` loop over it, ends the decoding; ``answer`` then holds what there is.
    """

    def __init__(self, pieces: Generator[str, None, None], finish: Callable[[], Answer]) -> None:
        self._pieces = pieces
        self._finish = finish
        self._answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        yield from self._pieces

    def close(self) -> None:
        """Stop decoding."""
        self._pieces.close()

    @property
    def answer(self) -> Answer:
        """The whole answer; what is not read yet is read first."""
        if self._answer is None:
            for _ in self._pieces:
                pass
            self._answer = self._finish()
        return self._answer
