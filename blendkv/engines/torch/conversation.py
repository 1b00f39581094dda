"""Conversations of the embedded engine: the blended history stays in a cache, later turns add to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from blendkv.engines.base import Conversation
from blendkv.engines.torch.cache import ContiguousCache
from blendkv.engines.torch.decode import Decoder
from blendkv.types import Prompt, Segment, SegmentKind, TokenIds, as_token_ids

if TYPE_CHECKING:
    from blendkv.engines.torch.engine import TorchEngine


class TorchConversation(Conversation):
    """The cache of a conversation, and the tokens whose KV it holds.

    ``room`` is how many tokens the cache takes beyond its first prompt before it grows.
    """

    def __init__(self, engine: TorchEngine, room: int = 512) -> None:
        self._engine, self._room = engine, room
        self._cache: ContiguousCache | None = None
        self._prompt = as_token_ids([])
        self._decoder: Decoder | None = None

    def behind(self, prompt: Prompt) -> tuple[Prompt, ContiguousCache]:
        """What is to be blended of the whole ``prompt``, and the cache that holds what stands before it.

        KV of tokens that the prompt does not go on with is dropped; the prompt's last segment always remains.
        """
        if self._cache is None:
            self._cache = self._engine.new_cache(len(prompt) + self._room)
        spoken = [] if self._decoder is None else self._decoder.tokens
        held = np.concatenate([self._prompt, as_token_ids(spoken)])[: self._cache.length]
        most = len(prompt) - len(prompt.segments[-1].token_ids)
        self._cache.crop_to(min(_common(held, prompt.token_ids), most))
        return _without(prompt, self._cache.length), self._cache

    def blended(self, prompt: Prompt, decoder: Decoder) -> None:
        """The cache holds the whole ``prompt``; ``decoder`` goes on in it."""
        self._prompt, self._decoder = prompt.token_ids, decoder


def _common(one: TokenIds, other: TokenIds) -> int:
    """Length of the common prefix."""
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if len(differs) else shorter


def _without(prompt: Prompt, tokens: int) -> Prompt:
    """The prompt behind its first ``tokens``; of a segment that is cut, the rest is history, which is computed."""
    rest = []
    for segment in prompt.segments:
        cut = min(tokens, len(segment.token_ids))
        tokens -= cut
        if cut == 0:
            rest.append(segment)
        elif cut < len(segment.token_ids):
            kind: SegmentKind = "query" if segment is prompt.segments[-1] else "history"
            rest.append(Segment(kind, as_token_ids(segment.token_ids[cut:])))
    return Prompt(tuple(rest))
