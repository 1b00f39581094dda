"""Where a text may be broken, and how well: headings, paragraphs, sentences, lines, words."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

INSIDE_WORD, AWKWARD, WORD, LINE, SENTENCE, PARAGRAPH, HEADING = range(7)
"""Levels of a place between two characters, from worst to best. ``AWKWARD`` is amid white space or behind a heading."""

PENALTIES = (1e6, 2.0, 1.0, 0.5, 0.3, 0.1, 0.0)
"""Cost of a cut per level, in units of one chunk that is a whole target too long. The first outweighs all others."""

_WHITE = re.compile(r"\s+")
_SENTENCE_END = re.compile(r"[.!?…]['\")\]»”’]*(?=\s)|[。！？｡]['\")\]」』”’]*")
# Kana, Han, Hangul and full-width forms are written without spaces: every character starts a word.
_UNSPACED = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]"
)
# "# Title" and "Title" over a rule of one repeated sign (reStructuredText, Setext).
_HEADING = re.compile(r"^(?:#{1,6}[ \t]+\S[^\n]*|[^\s][^\n]*\n([=\-*~^#\"'+])\1{2,}[ \t]*\r?$)", re.MULTILINE)


def break_levels(text: str) -> npt.NDArray[np.int8]:
    """Rate every place of ``text``.

    Returns
    -------
    numpy.ndarray
        int8 ``[len(text) + 1]``; entry ``i`` is the level of a cut between characters ``i - 1`` and ``i``.
    """
    levels = np.zeros(len(text) + 1, dtype=np.int8)
    for match in _UNSPACED.finditer(text):
        levels[match.start()] = levels[match.end()] = WORD
    ends = set()
    for match in _SENTENCE_END.finditer(text):
        ends.add(match.end())
        levels[match.end()] = SENTENCE
    for match in _WHITE.finditer(text):
        _rate_white(levels, match.group(), match.start(), match.start() in ends)
    _rate_headings(levels, text)
    return levels


def _rate_white(levels: npt.NDArray[np.int8], run: str, start: int, after_sentence: bool) -> None:
    """Rate the places in and around a run of white space that starts at ``start``."""
    end = start + len(run)
    lines = run.count("\n") or run.count("\r")
    if not lines:
        levels[start : end + 1] = SENTENCE if after_sentence else WORD
        return
    last_line = start + max(run.rfind("\n"), run.rfind("\r")) + 1
    levels[start:last_line] = AWKWARD
    if lines > 1:
        levels[last_line : end + 1] = PARAGRAPH
    else:
        levels[last_line : end + 1] = SENTENCE if after_sentence else LINE


def _rate_headings(levels: npt.NDArray[np.int8], text: str) -> None:
    """Favour places before headings and spoil those up to the text that a heading announces."""
    previous_body = -1
    for match in _HEADING.finditer(text):
        start, end = match.span()
        white = _WHITE.match(text, end)
        body = white.end() if white else end
        # A heading right behind another one belongs to it.
        levels[start] = WORD if start == previous_body else HEADING
        inside = levels[start + 1 : body + 1]
        np.minimum(inside, AWKWARD, out=inside)
        previous_body = body
