"""What of a chunk's content the index keeps, and in what form: token ids and recipes are text to whoever can decode.

A recipe holds the token ids of the system prefix. In an encrypted store both are sealed; the rest of a row (key,
fingerprint, sizes, times, tenant's tag) is not.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol, TypeVar

import numpy as np

from blendkv.errors import DamagedChunkError
from blendkv.store.chunkfile import recipe_from_json, recipe_to_json
from blendkv.store.seal import Sealer
from blendkv.types import Recipe, TokenIds

SCOPE = "index=1"
"""Of the sealer: no remote tier's namespace has an "="."""
_RECIPES = 1024  # many chunks, few recipes
_UNREADABLE = Recipe("bos", (), "unreadable")
_NO_IDS: TokenIds = np.zeros(0, dtype=np.int32)

_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")


class Cells(Protocol):
    """Writes and reads the two columns that tell of a chunk's content."""

    def recipe_text(self, recipe: Recipe) -> str:
        """What stands for a recipe in the index; chunks of one recipe need not have the same."""

    def recipe(self, text: str) -> Recipe:
        """Inverse of `recipe_text`."""

    def ids_blob(self, key: str, token_ids: TokenIds) -> bytes:
        """What stands for the token ids of the chunk ``key``."""

    def ids(self, key: str, blob: bytes) -> TokenIds:
        """Inverse of `ids_blob`; read-only, in the memory of ``blob`` where that can be."""


class PlainCells:
    """As they are."""

    def recipe_text(self, recipe: Recipe) -> str:
        """JSON."""
        return recipe_to_json(recipe)

    def recipe(self, text: str) -> Recipe:
        """Inverse of `recipe_text`."""
        return _parsed(text)

    def ids_blob(self, key: str, token_ids: TokenIds) -> bytes:
        """Little-endian int32."""
        return np.ascontiguousarray(token_ids, dtype="<i4").tobytes()

    def ids(self, key: str, blob: bytes) -> TokenIds:
        """Inverse of `ids_blob`."""
        return _view(blob)


class SealedCells:
    """Sealed with AES-256-GCM (`blendkv.store.seal`), token ids under their chunk's key.

    What does not open was altered: it reads as no tokens, or as a recipe that there is not. Then the chunk's file
    contradicts the index, and the chunk is dropped as damaged.
    """

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer
        self._warned = False
        # A recipe is sealed once in a process and opened once: all its rows have the same text, which tells no more
        # than that they were made alike.
        self._texts = lru_cache(maxsize=_RECIPES)(self._seal_recipe)
        self._recipes = lru_cache(maxsize=_RECIPES)(self._open_recipe)

    def recipe_text(self, recipe: Recipe) -> str:
        """Sealed JSON in base64."""
        return self._texts(recipe)

    def recipe(self, text: str) -> Recipe:
        """Inverse of `recipe_text`."""
        return self._recipes(text)

    def ids_blob(self, key: str, token_ids: TokenIds) -> bytes:
        """Sealed little-endian int32."""
        return self._sealer.seal(key, 0, np.ascontiguousarray(token_ids, dtype="<i4").tobytes())

    def ids(self, key: str, blob: bytes) -> TokenIds:
        """Inverse of `ids_blob`."""
        return self._or(_NO_IDS, lambda: _view(self._sealer.open(key, 0, blob)))

    def _seal_recipe(self, recipe: Recipe) -> str:
        return base64.b64encode(self._sealer.seal("recipe", 0, recipe_to_json(recipe).encode())).decode()

    def _open_recipe(self, text: str) -> Recipe:
        def opened() -> Recipe:
            return recipe_from_json(self._sealer.open("recipe", 0, base64.b64decode(text)).decode())

        return self._or(_UNREADABLE, opened)

    def _or(self, otherwise: _Value, read: Callable[[], _Value]) -> _Value:
        try:
            return read()
        except (DamagedChunkError, ValueError) as error:
            if not self._warned:
                _log.warning("the index has rows that do not open; their chunks are dropped (said once): %s", error)
            self._warned = True
            return otherwise


def _view(blob: bytes) -> TokenIds:
    """Token ids in the memory of ``blob``: read-only, because bytes are."""
    return np.frombuffer(blob, dtype="<i4").astype(np.int32, copy=False)


@lru_cache(maxsize=_RECIPES)
def _parsed(text: str) -> Recipe:
    return recipe_from_json(text)
