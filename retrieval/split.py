"""Splitting: a document is tokenised once, whole, and cut between tokens.

A token may look different when its neighbours change, so a chunk that is tokenised again need not give the ids it
had inside its document. Here ids are made once and then only carried: the chunks' ids, put together, are the
document's ids, and their texts, put together, are its text.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from blendkv.errors import DocumentError, InputError
from blendkv.retrieval.breaks import INSIDE_WORD, PENALTIES, break_levels
from blendkv.tokens import text_encoder
from blendkv.types import Chunk, Document, TokenIds, as_token_ids

log = logging.getLogger(__name__)

MIN_TARGET_TOKENS = 32
"""Below this a chunk could be shorter than the tokens of one exotic character."""

MAX_TOKENS_RATIO = 1.25
"""A chunk has at most this many times the target's tokens."""


def normalise(text: str) -> str:
    r"""Return ``text`` with its trailing white space replaced by ``"\n\n"``, so that chunks need no separators."""
    return text.rstrip() + "\n\n"


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer that cannot say which characters a token covers.

    Raises
    ------
    InputError
        If it is not one of transformers' fast tokenizers.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"tokenizer {type(tokenizer).__name__} gives no character offsets; a fast tokenizer is needed: "
            "load it with AutoTokenizer and keep its tokenizer.json beside the model"
        )


def tokenise(tokenizer: Any, text: str, name: str) -> tuple[TokenIds, npt.NDArray[np.int64]]:
    """Tokenise ``text`` whole, without special tokens; text that spells a special token stays plain text.

    Parameters
    ----------
    tokenizer
        A fast tokenizer of transformers.
    text
        Any text.
    name
        What to call the text in an error.

    Returns
    -------
    tuple
        Token ids, int32 ``[tokens]``, and their character spans, int64 ``[tokens, 2]``.

    Raises
    ------
    DocumentError
        If the text holds a lone surrogate, which no encoding can express.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DocumentError(
            f"{name}: lone surrogate at character {error.start}; valid Unicode is allowed: mend or drop the text"
        ) from None
    return text_encoder(tokenizer).spans(text)


class Splitter:
    """Cuts documents into chunks of about ``target_tokens`` tokens, never more than ``max_tokens``.

    The cuts of a document minimise the sum over chunks of ``((tokens - target) / target)^2`` plus a penalty per cut
    that grows from headings over paragraphs, sentences and lines to plain words. A word is cut only when it is
    longer than ``max_tokens``; ``words_cut`` counts these.

    Parameters
    ----------
    tokenizer
        A fast tokenizer of transformers.
    target_tokens
        Wanted tokens per chunk, at least 32. ``max_tokens`` is 1.25 times that.

    Raises
    ------
    InputError
        If the tokenizer gives no offsets, or the target is too small.
    """

    def __init__(self, tokenizer: Any, target_tokens: int = 384) -> None:
        check_tokenizer(tokenizer)
        if target_tokens < MIN_TARGET_TOKENS:
            raise InputError(
                f"target_tokens is {target_tokens}; at least {MIN_TARGET_TOKENS} is allowed: ask for longer chunks"
            )
        self.tokenizer = tokenizer
        self.target_tokens = target_tokens
        self.max_tokens = int(target_tokens * MAX_TOKENS_RATIO)
        self.words_cut = 0

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """What the chunks of a text depend on: equal settings give equal chunks. JSON values."""
        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        # Padding and truncation are left behind by whoever used the tokenizer last.
        state.pop("padding", None)
        state.pop("truncation", None)
        digest = hashlib.blake2b(json.dumps(state, sort_keys=True).encode(), digest_size=16).hexdigest()
        return {"method": 1, "tokenizer": digest, "target_tokens": self.target_tokens, "max_tokens": self.max_tokens}

    def split(self, document: Document) -> list[Chunk]:
        """Return the document's chunks, in order.

        Spans are those of ``normalise(document.text)``, whose token ids and characters the chunks cover without gap
        or overlap. Chunks carry the document's metadata.

        Raises
        ------
        DocumentError
            If the text is blank, holds a lone surrogate, or has one character of more than ``max_tokens`` tokens.
        """
        text = normalise(document.text)
        if not text.strip():
            raise DocumentError(f"{document.id}: no text; give a document with at least one word")
        ids, offsets = tokenise(self.tokenizer, text, document.id)
        if not ids.size:
            raise DocumentError(f"{document.id}: the tokenizer makes no token of its text; give readable text")
        tokens, chars, levels = self._candidates(document.id, text, ids.size, offsets)
        picked = best_cuts(tokens, np.array(PENALTIES)[levels], self.target_tokens, self.max_tokens)
        self._count_words_cut(document.id, int(np.sum(levels[picked] == INSIDE_WORD)))
        token_cuts, char_cuts = tokens[picked], chars[picked]
        return [
            Chunk(
                document_id=document.id,
                index=index,
                text=text[char_cuts[index] : char_cuts[index + 1]],
                token_ids=as_token_ids(ids[token_cuts[index] : token_cuts[index + 1]]),
                start=int(char_cuts[index]),
                end=int(char_cuts[index + 1]),
                metadata=document.metadata,
            )
            for index in range(len(picked) - 1)
        ]

    def _candidates(
        self, name: str, text: str, count: int, offsets: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """Places where a cut may be: token index, character and level, each ``[places]``, both ends included."""
        # Characters up to reached[i] belong to tokens before i; white space that a tokenizer leaves out of its spans
        # goes to the token behind it.
        reached = np.maximum.accumulate(offsets[:, 1])
        tokens = np.arange(1, count, dtype=np.int64)
        # A token that starts before its forerunners end shares a character with them (byte-level BPE).
        tokens = tokens[offsets[1:, 0] >= reached[:-1]]
        chars = reached[tokens - 1]
        fresh = np.diff(chars, prepend=0) > 0
        tokens, chars = tokens[fresh], chars[fresh]
        levels = break_levels(text)[chars]

        ends = np.array([0, count], dtype=np.int64)
        word_starts = np.concatenate([ends[:1], tokens[levels > INSIDE_WORD], ends[1:]])
        # Only where a single word is too long for a chunk are places inside it offered.
        gap = np.searchsorted(word_starts, tokens, side="right")
        too_long = np.diff(word_starts, append=count) > self.max_tokens
        keep = (levels > INSIDE_WORD) | too_long[gap - 1]
        tokens = np.concatenate([ends[:1], tokens[keep], ends[1:]])
        longest = int(np.diff(tokens).max())
        if longest > self.max_tokens:
            raise DocumentError(
                f"{name}: one character makes {longest} tokens; a chunk holds at most {self.max_tokens}: "
                "raise target_tokens"
            )
        chars = np.concatenate([[0], chars[keep], [len(text)]])
        top = np.array([len(PENALTIES) - 1], dtype=np.int8)
        return tokens, chars, np.concatenate([top, levels[keep], top])

    def _count_words_cut(self, name: str, cuts: int) -> None:
        if cuts and not self.words_cut:
            log.warning(
                "%s: a word of more than %d tokens is cut; later ones are only counted (Splitter.words_cut)",
                name,
                self.max_tokens,
            )
        self.words_cut += cuts


def best_cuts(
    places: npt.NDArray[np.int64], penalties: npt.NDArray[np.float64], target: int, limit: int
) -> npt.NDArray[np.int64]:
    """Choose cuts by dynamic programming, in time linear in the number of places.

    Parameters
    ----------
    places
        Token indices, int64 ``[places]``, rising, no two neighbours more than ``limit`` apart; the first and the
        last are always cuts.
    penalties
        Cost of a cut at each place, float64 ``[places]``.
    target, limit
        Wanted and greatest tokens between two cuts.

    Returns
    -------
    numpy.ndarray
        Indices into ``places``, int64 ``[chunks + 1]``.
    """
    first = np.searchsorted(places, places - limit)
    best = np.zeros(len(places))
    parent = np.zeros(len(places), dtype=np.int64)
    for here in range(1, len(places)):
        low = first[here]
        off = (places[here] - target - places[low:here]) / target
        costs = best[low:here] + off * off
        choice = int(costs.argmin())
        best[here] = costs[choice] + penalties[here]
        parent[here] = low + choice
    picked = [len(places) - 1]
    while picked[-1]:
        picked.append(int(parent[picked[-1]]))
    return np.array(picked[::-1], dtype=np.int64)
