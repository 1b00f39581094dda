"""What no prompt and no chunks may do: be trusted on hashes, or cost more than a bounded amount of work."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from blendkv.matching import finder, hashing
from blendkv.matching.finder import PAIRS, PAIRS_PER_TOKEN
from blendkv.matching.lookup import Candidates, PairBudget
from blendkv.matching.overlaps import choose

LENGTHS = range(32, 600)


def limit(prompt):
    return PAIRS + PAIRS_PER_TOKEN * len(prompt)


@pytest.mark.parametrize("period", [1, 2, 7])
def test_periodic_text(world, text, period):
    pattern = text(period)
    repeated = pattern * 4096
    world.add(*(repeated[:n] for n in LENGTHS))
    prompt = repeated[:4096]
    matches = world.find(prompt)
    counts = world.finder.counts
    assert counts.pairs <= 2 * limit(prompt)
    assert counts.pairs_dropped > 0
    assert sum(m.tokens for m in matches) > 0.9 * len(prompt)


def test_near_duplicates_cost_no_more_than_one_chunk(world, text):
    base = text(100)
    world.add(*([*base[:50], n, *base[51:]] for n in range(3, 2003)))
    prompt = [1, *base[:50], 77, *base[51:]]
    assert world.spans(prompt) == [(1, 101, 0)]
    assert world.finder.counts.pairs < 50


def test_chunks_that_differ_at_their_edges_only(world, text):
    base = text(100)
    world.add(*([*base[:2], n, *base[3:]] for n in range(3, 20_003)))
    prompt = [1, *base[:2], 1, *base[3:]] * 3
    matches = world.find(prompt)
    assert [m.start for m in matches] == [4, 105, 206]  # one of them, behind the token that differs
    assert world.finder.counts.pairs <= 2 * limit(prompt)
    assert world.finder.counts.pairs_dropped > 0


def test_the_bound_is_told_once(world, text, caplog):
    world.add(*([7] * n for n in LENGTHS))
    for _ in range(3):
        world.find([7] * 4096)
    assert [record.message.split(" places")[0] for record in caplog.records] == ["a prompt has more"]


def test_a_bounded_expansion_is_fair():
    counts = np.array([1, 500, 3, 0, 2000, 40])
    first = np.array([0, 10, 1000, 5, 5000, 600])
    budget = PairBudget(limit=400)
    hit, place = budget.expand(first, first + counts)
    taken = np.bincount(hit, minlength=6)
    assert taken.tolist() == [1, 178, 3, 0, 178, 40]
    assert (budget.pairs, budget.dropped) == (400, counts.sum() - 400)
    assert len(set(zip(hit.tolist(), place.tolist(), strict=True))) == 400
    assert ((place >= first[hit]) & (place < (first + counts)[hit])).all()
    assert place[hit == 4].max() == 6999  # the last place, and some over the whole range
    assert place[hit == 4].min() < 5020
    hit, place = PairBudget(limit=10_000).expand(first, first + counts)
    for number in range(6):
        assert sorted(place[hit == number]) == list(range(first[number], first[number] + counts[number]))
    assert PairBudget(limit=10).expand(first[:0], first[:0])[0].tolist() == []


def test_hashes_that_collide_are_found_out(new_world, text, oracle, monkeypatch):
    mixed = hashing.mix_tokens
    monkeypatch.setattr(hashing, "mix_tokens", lambda ids: mixed(ids % 1))  # all runs of one length collide
    world = new_world()
    chunks = [text(n) for n in (40, 40, 41, 64)]
    behind = text(6)
    world.add(*chunks)
    world.add(chunks[0], recipe=world.behind(behind))
    world.add(behind, recipe=world.start)
    for order in itertools.permutations(range(4), 3):
        prompt = [1, *(token for number in order for token in [*chunks[number], *text(3)])]
        matches = world.find(prompt)
        oracle(world, prompt).check(matches)
        assert len(matches) == 3
    found = world.find([*behind, *chunks[0]])
    assert [(m.kind, m.start, m.stop, m.recipe.prefix) for m in found] == [
        ("system", 0, 6, ()),
        ("chunk", 6, 46, tuple(behind)),
    ]
    assert [m.kind for m in world.find([*behind[:-1], 1, *chunks[0]])] == ["chunk"]
    assert world.finder.counts.collisions > 0


def test_a_single_collision_costs_one_comparison(world, text, monkeypatch):
    mixed = hashing.mix_tokens
    monkeypatch.setattr(hashing, "mix_tokens", lambda ids: mixed(np.where(ids == 40_001, 40_002, ids)))
    whole = text(100)
    whole[60] = 40_001
    world.add(whole, whole[:50])
    assert world.spans([1, *whole]) == [(1, 101, 0)]
    whole[60] = 40_002
    assert world.spans([1, *whole]) == [(1, 51, 0)]
    assert world.finder.counts.collisions == 1


def test_comparisons_are_bounded_too(world, text, monkeypatch):
    mixed = hashing.mix_tokens
    monkeypatch.setattr(hashing, "mix_tokens", lambda ids: mixed(ids % 1))
    monkeypatch.setattr(finder, "_COMPARED_PER_TOKEN", 0)
    world.add(text(40))
    assert world.find(text(400)) == []
    assert world.finder.counts.collisions > 0


def test_equal_runs_have_equal_hashes_wherever_they_stand(rng):
    ids = rng.integers(0, 3, 400).astype(np.int32)
    again = np.concatenate([rng.integers(0, 3, 37), ids]).astype(np.int32)
    starts = rng.integers(0, 350, 200)
    lengths = rng.integers(0, 50, 200)
    one, other = hashing.RunHashes(ids), hashing.RunHashes(again)
    assert (one.of(starts, lengths) == other.of(starts + 37, lengths)).all()
    assert (one.windows(16) == one.of(np.arange(385), np.full(385, 16))).all()
    assert len(hashing.RunHashes(ids[:15]).windows(16)) == 0
    runs = {ids[a : a + n].tobytes() for a, n in zip(starts, lengths, strict=True)}
    assert len(set(one.of(starts, lengths).tolist())) == len(runs)
    assert hashing.ragged(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]


def test_one_long_chunk_rather_than_two_that_cover_as_much():
    start, stop, zeros = np.array([0, 10, 2]), np.array([10, 20, 22]), np.zeros(3, dtype=np.int64)
    assert choose(Candidates(start, stop, zeros, zeros, zeros)).tolist() == [2]


def test_the_choice_of_intervals_is_the_best_one(rng):
    for _ in range(200):
        count = int(rng.integers(0, 9))
        start = rng.integers(0, 30, count)
        stop = start + rng.integers(1, 12, count)
        rank = rng.integers(0, 3, count)
        zeros = np.zeros(count, dtype=np.int64)
        chosen = choose(Candidates(start, stop, zeros, zeros, rank)).tolist()
        best = (0, 0)  # tokens, and fewer intervals rather than more
        for some in itertools.product((False, True), repeat=count):
            picked = sorted((a, b) for a, b, take in zip(start, stop, some, strict=True) if take)
            if all(one[1] <= other[0] for one, other in itertools.pairwise(picked)):
                best = max(best, (sum(int(b - a) for a, b in picked), -len(picked)))
        assert (sum(int(stop[i] - start[i]) for i in chosen), -len(chosen)) == best
        assert all(stop[i] <= start[j] for i, j in itertools.pairwise(chosen))
        for i in chosen:
            assert rank[i] == max(rank[(start == start[i]) & (stop == stop[i])])
