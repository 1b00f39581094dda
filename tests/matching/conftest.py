from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from blendkv.matching import EDGE, MIN_TOKENS, ChunkFinder, Match
from blendkv.store.index import Index, Row
from blendkv.types import Recipe, as_token_ids, chunk_key

BOS = 1


class World:
    """An index, written to directly, and a finder on it. A chunk is (token ids, recipe)."""

    def __init__(self, folder: Path, bos: int | None = BOS) -> None:
        self.bos = bos
        self.plain = Recipe("bos", () if bos is None else (bos,), "float32")
        self.start = Recipe("system", (), "float32")
        self.index = Index(folder / "index.sqlite")
        self.finder = ChunkFinder(SimpleNamespace(index=self.index), "model", "float32", bos)
        self.chunks: list[tuple[list[int], Recipe]] = []

    def behind(self, prefix: list[int]) -> Recipe:
        return Recipe("system", tuple(prefix), "float32")

    def add(self, *chunks, recipe: Recipe | None = None, fingerprint: str = "model") -> list[str]:
        recipe = recipe or self.plain
        keys = []
        with self.index.transaction():
            for chunk in chunks:
                ids = as_token_ids(chunk)
                keys.append(chunk_key(fingerprint, recipe, ids))
                if self.index.row(keys[-1]) is None:
                    self.index.insert(Row(keys[-1], fingerprint, recipe, ids, 1, 1, "p", 0.0, 0.0))
                    self.chunks.append((ids.tolist(), recipe))
        return keys

    def remove(self, *keys: str) -> None:
        with self.index.transaction():
            for key in keys:
                self.index.delete(key)

    def find(self, prompt) -> list[Match]:
        self.finder.refresh()
        matches = self.finder.find(prompt)
        check(prompt, matches)
        return matches

    def spans(self, prompt) -> list[tuple[int, int, int]]:
        """(start, stop, chunk_start) of what is found."""
        return [(m.start, m.stop, m.chunk_start) for m in self.find(prompt)]


def check(prompt, matches: list[Match]) -> None:
    """In order, without overlaps, and the tokens are those of the chunk."""
    for one, other in itertools.pairwise(matches):
        assert one.stop <= other.start
    for m in matches:
        assert 0 <= m.start < m.stop <= len(prompt)
        assert list(prompt[m.start : m.stop]) == m.token_ids[m.chunk_start : m.chunk_start + m.tokens].tolist()
        assert m.key == chunk_key("model", m.recipe, m.token_ids)
        assert m.whole == (m.tokens == len(m.token_ids))


@dataclass
class Oracle:
    """What there is to find, by trying every chunk at every position."""

    placements: set[tuple[int, int]]
    tokens: int

    @classmethod
    def of(cls, world: World, prompt: list[int], first: int = 0) -> Oracle:
        placements = set()
        for ids, recipe in world.chunks:
            floor = max(first, len(recipe.prefix))
            system = recipe.kind == "system"
            wrong = system and (not recipe.prefix or tuple(prompt[: len(recipe.prefix)]) != recipe.prefix)
            if wrong or (not system and recipe != world.plain) or len(ids) < MIN_TOKENS:
                continue
            inner = ids[EDGE:-EDGE]
            for begin in range(floor, len(prompt) - len(inner) + 1):
                if prompt[begin : begin + len(inner)] != inner:
                    continue
                start, stop, left, right = begin, begin + len(inner), EDGE, len(ids) - EDGE
                while left > 0 and start > floor and prompt[start - 1] == ids[left - 1]:
                    start, left = start - 1, left - 1
                while right < len(ids) and stop < len(prompt) and prompt[stop] == ids[right]:
                    stop, right = stop + 1, right + 1
                placements.add((start, stop))
        best = [0] * (len(prompt) + 1)
        by_stop: dict[int, list[int]] = {}
        for start, stop in placements:
            by_stop.setdefault(stop, []).append(start)
        for stop in range(1, len(prompt) + 1):
            best[stop] = max([best[stop - 1], *(best[start] + stop - start for start in by_stop.get(stop, []))])
        return cls(placements, best[-1])

    def check(self, matches: list[Match]) -> None:
        found = [m for m in matches if m.kind == "chunk"]
        assert {(m.start, m.stop) for m in found} <= self.placements
        assert sum(m.tokens for m in found) == self.tokens


@pytest.fixture(scope="session")
def new_world() -> Iterator[Callable[..., World]]:
    """Makes worlds, also within one test; all are closed in the end."""
    worlds = []
    with tempfile.TemporaryDirectory() as folder:

        def make(bos: int | None = BOS) -> World:
            path = Path(folder) / str(len(worlds))
            path.mkdir()
            worlds.append(World(path, bos))
            return worlds[-1]

        yield make
        for world in worlds:
            world.index.close()


@pytest.fixture
def world(new_world: Callable[..., World]) -> World:
    return new_world()


@pytest.fixture(scope="session")
def oracle() -> Callable[..., Oracle]:
    return Oracle.of


@pytest.fixture
def rng() -> np.random.Generator:
    from tiny import seed_of_run

    seed = seed_of_run()
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.fixture
def text(rng: np.random.Generator) -> Callable[[int], list[int]]:
    """Random tokens, none of which comes twice in a test: what touches a chunk never happens to continue it.

    All are even, so that a token changed by one is no other's either.
    """
    left = (2 * rng.permutation(np.arange(2, 500_000))).tolist()

    def take(tokens: int) -> list[int]:
        assert tokens <= len(left), "the test asks for more tokens than there are"
        taken = left[:tokens]
        del left[:tokens]
        return taken

    return take
