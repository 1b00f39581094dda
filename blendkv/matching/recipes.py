"""Which recipes may serve a prompt, and from which position on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blendkv.matching.hashing import Ints, RunHashes
from blendkv.types import Recipe, TokenIds, as_token_ids, chunk_key

_PREFIXES = 8  # nested system prefixes that one prompt may use; beyond, the shortest do not count


@dataclass(frozen=True)
class Allowed:
    """Recipes that may serve a prompt, int64 columns.

    ``number`` is the recipe's, ``floor`` the first position where its chunk KVs may stand. ``preference`` counts the
    tokens of its system prefix, 0 for kind ``bos``: of two chunk KVs of the same tokens the larger is better.
    """

    number: Ints
    floor: Ints
    preference: Ints

    def after(self, position: int) -> Allowed:
        """The same, for chunks from ``position`` on."""
        return Allowed(self.number, np.maximum(self.floor, position), self.preference)


class RecipeBook:
    """The recipes of one model, dtype, codec and tenant whose chunk KVs may match, numbered in the order they came.

    Kind ``bos`` with the model's BOS before the chunk always may; kind ``system`` behind a prefix that is not empty
    may where the prompt begins with that prefix. Chunk KV of any other recipe saw tokens that the prompt does not have.
    """

    def __init__(self, fingerprint: str, dtype: str, codec: str, bos_token_id: int | None, tenant: str = "") -> None:
        bos = () if bos_token_id is None else (bos_token_id,)
        self._fingerprint = fingerprint
        self._bos = Recipe("bos", bos, dtype, codec, tenant)
        self._dtype, self._codec, self._tenant = dtype, codec, tenant
        self.start = Recipe("system", (), dtype, tenant=tenant)
        """The recipe of a system prefix itself, which is raw whatever the chunks are."""
        self.recipes: list[Recipe] = []
        self._numbers: dict[Recipe, int] = {}
        self._prefixes: list[TokenIds] = []
        self._keys: list[str] = []  # of each system prefix's own KV; empty for kind bos
        self._lengths = np.zeros(0, dtype=np.int64)
        self._hashes = np.zeros(0, dtype=np.uint64)

    def number(self, recipe: Recipe) -> int | None:
        """The number of a recipe, or None if its chunk KVs never match."""
        known = self._numbers.get(recipe)
        if known is not None or not self._allowed(recipe):
            return known
        prefix = as_token_ids(recipe.prefix)
        length = np.array([len(prefix)])
        self._numbers[recipe] = len(self.recipes)
        self.recipes.append(recipe)
        self._prefixes.append(prefix)
        self._keys.append(chunk_key(self._fingerprint, self.start, prefix) if recipe.kind == "system" else "")
        self._lengths = np.append(self._lengths, length)
        self._hashes = np.append(self._hashes, RunHashes(prefix).of(np.zeros(1, dtype=np.int64), length))
        return len(self.recipes) - 1

    def allowed(self, ids: TokenIds, hashes: RunHashes) -> Allowed:
        """The recipes whose chunk KVs may stand in the prompt: ``bos``, and the longest system prefixes it begins with.

        As many tokens as the recipe's prefix had must come before. So the token at position 0, to which models attend
        most, is never one whose KV was computed elsewhere.
        """
        bos = [self._numbers[self._bos]] if self._bos in self._numbers else []
        number = np.array(bos + self._begins(ids, hashes)[:_PREFIXES], dtype=np.int64)
        return Allowed(number, self._lengths[number], np.where(np.isin(number, bos), 0, self._lengths[number]))

    def starts(self, ids: TokenIds, hashes: RunHashes) -> list[tuple[str, TokenIds]]:
        """(key, token ids) of the system prefixes that the prompt begins with, longest first."""
        return [(self._keys[number], self._prefixes[number]) for number in self._begins(ids, hashes)]

    def _begins(self, ids: TokenIds, hashes: RunHashes) -> list[int]:
        """Recipes of kind ``system`` with whose prefix the prompt begins, longest first."""
        short = np.flatnonzero(self._lengths <= len(ids))
        equal = hashes.of(np.zeros(len(short), dtype=np.int64), self._lengths[short]) == self._hashes[short]
        found = [
            number
            for number in short[equal].tolist()
            if self.recipes[number].kind == "system"
            and np.array_equal(self._prefixes[number], ids[: self._lengths[number]])
        ]
        return sorted(found, key=lambda number: -int(self._lengths[number]))

    def _allowed(self, recipe: Recipe) -> bool:
        if (recipe.dtype, recipe.codec, recipe.tenant) != (self._dtype, self._codec, self._tenant):
            return False
        return recipe == self._bos or (recipe.kind == "system" and len(recipe.prefix) > 0)
