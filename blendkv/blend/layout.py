"""Where every token of a prompt stands and where its KV comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from blendkv.store.base import ChunkReader
from blendkv.types import Prompt


@dataclass(frozen=True)
class Span:
    """One segment of the prompt at absolute positions ``start .. stop - 1``.

    ``index`` is its place among the prompt's segments. A span is ``stored`` when its KV is read from a source, and
    ``exact`` when that KV is what full prefill would give there; the others are computed fresh or are candidates.
    """

    index: int
    kind: str
    start: int
    stop: int
    stored: bool
    exact: bool

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """A prompt's spans behind ``offset`` tokens that the sink holds already."""

    spans: tuple[Span, ...]
    offset: int
    total: int

    @property
    def stored(self) -> tuple[Span, ...]:
        """Spans whose KV is read from the source."""
        return tuple(s for s in self.spans if s.stored)

    @property
    def candidates(self) -> tuple[Span, ...]:
        """Stored spans that are not exact: their tokens may be selected for recomputation."""
        return tuple(s for s in self.spans if s.stored and not s.exact)

    @property
    def reusable_tokens(self) -> int:
        """Tokens of chunks with stored KV: the denominator of every budget (a stored system prefix is not counted)."""
        return sum(len(s) for s in self.stored if s.kind == "chunk")

    @property
    def candidate_tokens(self) -> int:
        """Tokens that may be selected."""
        return sum(len(s) for s in self.candidates)

    def positions(self, kind: str | None = None, *, fresh: bool = False, candidates: bool = False) -> torch.Tensor:
        """Absolute positions, ascending int64, of spans that are of a kind, fresh, or candidates."""
        chosen = [
            s
            for s in self.spans
            if s.kind == kind or (fresh and not s.stored) or (candidates and s.stored and not s.exact)
        ]
        parts = [torch.arange(s.start, s.stop) for s in chosen]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def lay_out(
    prompt: Prompt,
    readers: Sequence[ChunkReader | None],
    offset: int = 0,
    same_rotation: Callable[[int, int], bool] = lambda short, total: True,
) -> Layout:
    """Place the segments of ``prompt`` one after the other from position ``offset`` on.

    A stored segment is exact when the tokens before it, from position 0 on, are those of its recipe's prefix, and
    ``same_rotation(stop, total)``: a text of ``stop`` tokens is rotated as it is within one of ``total``.
    """
    ids = prompt.token_ids
    total = len(ids) + offset
    spans, start = [], 0
    for i, (segment, reader) in enumerate(zip(prompt.segments, readers, strict=True)):
        stop = start + len(segment.token_ids)
        exact = False
        if reader is not None and offset == 0:
            prefix = reader.recipe.prefix
            same = len(prefix) == start and np.array_equal(ids[:start], np.asarray(prefix, dtype=np.int32))
            exact = same and same_rotation(stop, total)
        spans.append(Span(i, segment.kind, start + offset, stop + offset, reader is not None, exact))
        start = stop
    return Layout(tuple(spans), offset, total)
