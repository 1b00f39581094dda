"""The worst items side by side: answers, and the passages with their recomputed tokens marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import escape

from blendkv.eval.items import ItemRecord, Result
from blendkv.eval.report.data import Report, short
from blendkv.eval.report.text import clean, figure, fixed, percent

NEAR = 12
"""Tokens on each side of a recomputed one that are shown without a click."""

ROOM = 24_000
"""Characters of HTML for the passages of one item; what does not fit is counted, not shown."""

_LONGEST = 600
_NO_ROOM = 64


@dataclass(frozen=True)
class Piece:
    """A run of tokens of a passage: plain, recomputed (``mark``), or far from any (``gap``, opened by a click)."""

    kind: Literal["text", "mark", "gap"]
    text: str
    tokens: int


@dataclass(frozen=True)
class Passage:
    """A passage as pieces; ``cut`` tokens had no room."""

    number: int
    tokens: int
    marked: int
    pieces: Sequence[Piece]
    cut: int


@dataclass(frozen=True)
class Answer:
    """A mode's answer with its figures."""

    mode: str
    text: str
    kl: str
    f1: str
    top1: str
    fallback: str


@dataclass(frozen=True)
class Item:
    """An item of the report. ``record`` tells what was asked; the passages are those of the closest blend."""

    id: str
    kl: str
    question: str
    gold: Sequence[str]
    full: str | None
    blended: str
    dropped: int
    ceiling: bool
    answers: Sequence[Answer]
    passages: Sequence[Passage]
    marked: int


def worst_items(report: Report, count: int = 10) -> list[Item]:
    """The items in which the closest blend is furthest from full prefill, worst first."""
    return [_item(report, result) for result in report.worst(count) if result.item in report.run.items]


def _item(report: Report, result: Result) -> Item:
    record = report.run.items[result.item]
    every = [r for r in report.run.results if r.item == result.item]
    full = next((_short(r.answer) for r in every if r.mode == "full"), None)
    passages = lay_out(record, result.selected)
    return Item(
        id=clean(result.item),
        kl=figure(result.kl),
        question=_short(record.question),
        gold=[_short(a) for a in record.answers],
        full=full,
        blended=_short(result.answer),
        dropped=record.dropped,
        ceiling=record.ceiling,
        answers=[_answer(r) for r in every],
        passages=passages,
        marked=sum(p.marked for p in passages),
    )


def _answer(result: Result) -> Answer:
    return Answer(
        short(result.mode),
        _short(result.answer),
        figure(result.kl),
        fixed(result.f1 if result.f1 is not None else result.rouge_l, 2),
        percent(result.top1, 0),
        clean(result.fallback or ""),
    )


def _short(text: str) -> str:
    """Safe to show, and no longer than a reader would go on with."""
    text = clean(text.strip())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text) - _LONGEST} more characters)"


def lay_out(record: ItemRecord, selected: Sequence[Sequence[int]] | None) -> list[Passage]:
    """Cut each passage into pieces, until there is no more room.

    Marked tokens and their neighbours come first: gaps get what room they leave.
    """
    chosen = [
        sorted({i for i in (selected[at] if selected and at < len(selected) else ()) if 0 <= i < len(tokens)})
        for at, tokens in enumerate(record.chunks)
    ]
    cut = [_cut(tokens, marked) for tokens, marked in zip(record.chunks, chosen, strict=True)]
    room = ROOM
    kept: set[tuple[int, int]] = set()
    for gaps in (False, True):
        for at, pieces in enumerate(cut):
            for place, piece in enumerate(pieces):
                size = len(escape(piece.text)) + _NO_ROOM
                if (piece.kind == "gap") is gaps and size <= room:
                    room -= size
                    kept.add((at, place))
    return [
        Passage(
            at + 1,
            len(record.chunks[at]),
            len(chosen[at]),
            [p if (at, place) in kept else Piece("gap", "", p.tokens) for place, p in enumerate(pieces)],
            sum(p.tokens for place, p in enumerate(pieces) if (at, place) not in kept),
        )
        for at, pieces in enumerate(cut)
    ]


def _cut(tokens: Sequence[str], marked: Sequence[int]) -> list[Piece]:
    """Neighbouring tokens of the same kind together. A gap shorter than its own button is text."""
    kinds: list[Literal["text", "mark", "gap"]] = ["gap"] * len(tokens)
    for at in marked:
        for near in range(max(0, at - NEAR), min(len(tokens), at + NEAR + 1)):
            kinds[near] = "text" if kinds[near] == "gap" else kinds[near]
        kinds[at] = "mark"
    pieces: list[Piece] = []
    start = 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or kinds[end] != kinds[start]:
            kind = kinds[start] if kinds[start] != "gap" or end - start > NEAR else "text"
            pieces.append(Piece(kind, clean("".join(tokens[start:end])), end - start))
            start = end
    return pieces
