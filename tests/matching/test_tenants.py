"""Matching by content: a tenant's chunks are found in that tenant's prompts only, and others' cost nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from blendkv.matching import ChunkFinder, TenantFinders
from blendkv.matching import tenants as module
from blendkv.types import chunk_key

A, B = "a" * 32, "b" * 32


@pytest.fixture
def rng():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def finders(world):
    """Every finder that is made, and the way to them."""
    made = []

    def make(tag):
        made.append(tag)
        return ChunkFinder(SimpleNamespace(index=world.index), "model", "float32", world.bos, "raw", tag)

    return TenantFinders(make), made


def ids(rng, count):
    return [rng.randrange(5, 50_000) for _ in range(count)]


def test_chunks_are_found_by_their_tenant_only(world, finders, rng):
    find, _ = finders
    chunk, shared = ids(rng, 60), ids(rng, 60)
    of = {tag: replace(world.plain, tenant=tag) for tag in ("", A, B)}
    world.add(chunk, recipe=of[A])
    for recipe in of.values():
        world.add(shared, recipe=recipe)
    prompt = [world.bos, *ids(rng, 9), *chunk, *ids(rng, 9), *shared, *ids(rng, 9)]
    find.refresh()
    assert [(m.tokens, m.recipe) for m in find.find(prompt)] == [(60, of[""])]
    assert [(m.tokens, m.recipe) for m in find.find(prompt, B)] == [(60, of[B])]
    found = find.find(prompt, A)
    assert [(m.tokens, m.recipe) for m in found] == [(60, of[A])] * 2
    assert found[0].key == chunk_key("model", of[A], found[0].token_ids)
    assert find.find(prompt, "c" * 32) == []


def test_a_system_prefix_is_its_tenants(world, finders, rng):
    find, _ = finders
    prefix, chunk = ids(rng, 20), ids(rng, 60)
    for tag in (A, B):
        world.add(chunk, recipe=replace(world.behind(prefix), tenant=tag))
    world.add(prefix, recipe=replace(world.start, tenant=A))
    prompt = [*prefix, *chunk, *ids(rng, 9)]
    assert [m.kind for m in find.find(prompt, A)] == ["system", "chunk"]
    assert [m.kind for m in find.find(prompt, B)] == ["chunk"]
    assert find.find(prompt) == []


def test_others_chunks_cost_a_finder_nothing(world, finders, rng):
    """Neither rows read nor pairs looked at: what others store shows in no figure, and so in no time."""
    find, _ = finders
    chunk = ids(rng, 60)
    world.add(chunk, recipe=replace(world.plain, tenant=A))
    world.add(*(chunk[:k] + ids(rng, 40) for k in range(40, 59)), recipe=replace(world.plain, tenant=B))
    asked = []
    entries = world.index.entries
    world.index.entries = lambda keys: asked.extend(keys) or entries(keys)
    assert len(find.find([world.bos, *ids(rng, 9), *chunk, 7], A)) == 1
    mine = find._finders[A]
    assert (len(mine), mine.counts.pairs_dropped) == (1, 0)
    assert set(asked) == {mine._key(0)}
    del world.index.entries


def test_what_comes_later_is_found_after_a_refresh(world, finders, rng):
    find, made = finders
    chunk, later = ids(rng, 60), ids(rng, 60)
    recipe = replace(world.plain, tenant=A)
    world.add(chunk, recipe=recipe)
    prompt = [world.bos, 9, *chunk, 9, *later, 9]
    find.refresh()
    assert len(find.find(prompt, A)) == 1
    world.add(later, recipe=recipe)
    find.refresh()
    assert len(find.find(prompt, A)) == 2
    world.remove(chunk_key("model", recipe, find.find(prompt, A)[0].token_ids))
    find.refresh()
    assert len(find.find(prompt, A)) == 1
    assert made == ["", A]


def test_only_so_many_finders_are_kept_and_never_without_the_default(world, finders, rng, monkeypatch):
    monkeypatch.setattr(module, "_KEPT", 3)
    find, made = finders
    for number in range(6):
        find.find([1, 2, 3], f"{number:032x}")
    assert list(find._finders) == ["", f"{4:032x}", f"{5:032x}"]
    find.refresh()
    find.find([1, 2, 3], f"{0:032x}")
    assert made.count(f"{0:032x}") == 2
