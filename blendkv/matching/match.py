"""A stored chunk found in a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from blendkv.types import Recipe, TokenIds


@dataclass(frozen=True)
class Match:
    """Prompt positions ``start .. stop - 1`` hold a chunk's tokens ``chunk_start .. chunk_start + tokens - 1``.

    ``kind`` is ``system`` for the KV of the system prefix at position 0, else ``chunk``. ``token_ids`` are those of
    the whole chunk, int32: what the store wants to hear beside the key.
    """

    kind: Literal["system", "chunk"]
    start: int
    stop: int
    key: str
    chunk_start: int
    recipe: Recipe
    token_ids: TokenIds = field(compare=False, repr=False)

    @property
    def tokens(self) -> int:
        """Tokens of the prompt that the match covers."""
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        """Whether it covers the chunk from its first token to its last."""
        return self.tokens == len(self.token_ids)
