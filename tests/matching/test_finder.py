"""Where chunks are found, and which."""

from __future__ import annotations

import pickle

import pytest

from blendkv.matching import EDGE, MIN_TOKENS
from blendkv.types import Recipe, as_token_ids


def test_chunks_in_any_order_at_any_offset(world, text):
    chunks = [text(n) for n in (32, 33, 57, 256, 700)]
    world.add(*chunks)
    prompt, expected = text(7), []
    for number in (3, 0, 4, 2, 1):
        expected.append((len(prompt), len(prompt) + len(chunks[number]), 0))
        prompt += chunks[number] + text(number)
    assert world.spans(prompt) == expected
    match = world.find(prompt)[1]
    assert (match.kind, match.whole, match.recipe, match.token_ids.tolist()) == ("chunk", True, world.plain, chunks[0])
    assert pickle.loads(pickle.dumps(match)) == match
    assert world.finder.find(as_token_ids(prompt)) == world.finder.find(prompt)


def test_a_missing_chunk_does_not_hide_the_others(world, text):
    first, missing, last = text(64), text(64), text(64)
    world.add(first, last)
    assert world.spans([1, *first, *missing, *last]) == [(1, 65, 0), (129, 193, 0)]


def test_adjacent_and_repeated_chunks(world, text):
    one, other = text(40), text(50)
    world.add(one, other)
    prompt = [1, *one, *one, *other, *one]
    assert world.spans(prompt) == [(1, 41, 0), (41, 81, 0), (81, 131, 0), (131, 171, 0)]


@pytest.mark.parametrize("tokens", [MIN_TOKENS, MIN_TOKENS + 1, 100])
def test_a_prompt_that_is_a_chunk(new_world, text, tokens):
    without_bos = new_world(bos=None)
    chunk = text(tokens)
    without_bos.add(chunk)
    assert without_bos.spans(chunk) == [(0, tokens, 0)]
    assert without_bos.spans([*chunk, 5]) == [(0, tokens, 0)]
    assert without_bos.spans([5, *chunk]) == [(1, tokens + 1, 0)]


def test_the_token_at_position_0_is_not_taken_from_a_chunk_that_stood_behind_bos(world, text):
    chunk = text(40)
    world.add(chunk)
    assert world.spans(chunk) == [(1, 40, 1)]


def test_short_prompts_and_short_chunks_have_no_match(world, text):
    short = text(MIN_TOKENS - 1)
    world.add(short)
    for prompt in ([], [5], short, text(23), text(24), text(25)):
        assert world.spans(prompt) == []
    assert len(world.finder) == 0


def test_every_loss_at_the_edges_up_to_four_tokens(world, text):
    chunk = text(MIN_TOKENS)
    world.add(chunk)
    for left in range(EDGE + 2):
        for right in range(EDGE + 2):
            before, after = text(left + 3), text(left * right)
            prompt = before + chunk[left : len(chunk) - right] + after
            found = world.spans(prompt)
            if max(left, right) > EDGE:
                assert found == []
            else:
                assert found == [(len(before), len(prompt) - len(after), left)]


def test_a_match_is_the_longest_run_around_the_interior(world, text):
    chunk = text(50)
    world.add(chunk)
    changed = list(chunk)
    changed[1] += 1  # token 0 agrees again, but the run ends at 2
    changed[-3] += 1
    assert world.spans([1, *changed]) == [(3, 48, 2)]


def test_a_changed_interior_is_no_match(world, text):
    chunk = text(50)
    world.add(chunk)
    for place in range(EDGE, 50 - EDGE):
        changed = list(chunk)
        changed[place] += 1
        assert world.spans([1, *changed]) == []


def test_overlaps_are_resolved_to_the_most_tokens(world, text):
    whole = text(200)
    middle, left, right = whole[40:160], whole[:90], whole[90:]
    world.add(middle)
    assert world.spans([1, *whole]) == [(41, 161, 0)]
    world.add(left, right)  # the longest first would take the middle and lose both
    assert world.spans([1, *whole]) == [(1, 91, 0), (91, 201, 0)]
    world.add(whole)  # as many tokens in one chunk
    assert world.spans([1, *whole]) == [(1, 201, 0)]


def test_the_whole_chunk_wins_over_a_part_of_a_longer_one(world, text):
    chunk = text(60)
    world.add([*text(2), *chunk, *text(3)])
    assert world.spans([1, 2, *chunk]) == [(2, 62, 2)]
    world.add(chunk)
    assert world.spans([1, 2, *chunk]) == [(2, 62, 0)]


def test_near_duplicates_are_told_apart(world, text, rng):
    base, chunks = text(120), []
    for _ in range(300):
        chunk = list(base)
        chunk[rng.integers(120)] = int(rng.integers(3, 40_000))
        chunks.append(chunk)
    keys = world.add(*chunks)
    for number in rng.integers(300, size=20).tolist():
        match = world.find([1, 2, *chunks[number], 2])[0]
        assert (match.key, match.whole) == (keys[number], True)


def test_only_this_model_dtype_codec_and_bos(world, text):
    prefix, chunk = text(20), text(64)
    world.add(chunk, fingerprint="other")
    for recipe in (
        Recipe("bos", (world.bos,), "bfloat16"),
        Recipe("bos", (world.bos,), "float32", "fp8"),
        Recipe("bos", (world.bos + 1,), "float32"),
        Recipe("bos", (), "float32"),
        Recipe("system", (), "float32"),
        Recipe("system", tuple(prefix), "bfloat16"),
    ):
        world.add(chunk, recipe=recipe)
    assert world.spans([*prefix, *chunk]) == []
    assert len(world.finder) == 0
    world.add(chunk)
    assert world.spans([*prefix, *chunk]) == [(20, 84, 0)]


def test_a_model_without_bos(new_world, text):
    world = new_world(bos=None)
    chunk = text(64)
    world.add(chunk, recipe=Recipe("bos", (1,), "float32"))
    assert world.spans(chunk) == []
    world.add(chunk)
    assert world.spans(chunk) == [(0, 64, 0)]


def test_chunk_kv_behind_another_system_prefix_never_matches(world, text):
    prefix, chunk = text(20), text(64)
    world.add(chunk, recipe=world.behind(prefix))
    assert world.spans([*prefix, *chunk]) == [(20, 84, 0)]
    assert world.spans([*prefix, *text(9), *chunk]) == [(29, 93, 0)]
    for other in ([], prefix[:-1], [*prefix[:-1], 2], [2, *prefix], prefix[::-1]):
        assert world.spans([*other, *chunk]) == []


def test_a_system_recipe_does_not_serve_its_own_prefix(world, text):
    prefix = text(90)
    world.add(prefix[10:80], recipe=world.behind(prefix))
    assert world.spans(prefix) == []
    assert world.spans([*prefix, *prefix[10:80]]) == [(90, 160, 0)]


def test_system_is_preferred_to_bos_and_the_longer_prefix_to_the_shorter(world, text):
    prefix, chunk = text(30), text(64)
    world.add(chunk)
    for known in (10, 30, 20):
        world.add(chunk, recipe=world.behind(prefix[:known]))
    for length, expected in ((9, 1), (10, 10), (25, 20), (30, 30), (30, 30)):
        (match,) = world.find([*prefix[:length], *text(3), *chunk])
        assert len(match.recipe.prefix) == expected
        assert match.recipe.kind == ("bos" if length < 10 else "system")


def test_the_system_prefix_itself(world, text):
    prefix, chunk = text(10), text(40)
    world.add(prefix, recipe=world.start)
    prompt = [*prefix, *chunk, 5]
    assert world.find(prompt) == []  # no chunk was computed behind it
    world.add(chunk, recipe=world.behind(prefix))
    first, second = world.find(prompt)
    assert (first.kind, first.start, first.stop, first.chunk_start, first.recipe) == ("system", 0, 10, 0, world.start)
    assert first.token_ids.tolist() == prefix
    assert first.whole
    assert (second.kind, second.start, second.stop) == ("chunk", 10, 50)
    longer = [*prefix, *chunk[:6]]
    world.add(chunk, recipe=world.behind(longer))
    assert world.find(prompt)[0].stop == 10  # the KV of the longer one is not there
    (key,) = world.add(longer, recipe=world.start)
    first, second = world.find([*longer, *chunk])
    assert (first.stop, first.key, second.start, second.recipe) == (16, key, 16, world.behind(longer))
    world.remove(key)
    assert world.finder.find([*longer, *chunk])[0].stop == 10
    assert world.find(prefix)[0].stop == 10


def test_no_chunk_reaches_into_the_system_match(world, text):
    prefix, chunk = text(20), text(40)
    world.add(prefix, recipe=world.start)
    world.add(text(40), recipe=world.behind(prefix))
    world.add([*prefix[-2:], *chunk], [*prefix[-10:], *text(40)])
    assert world.spans([*prefix, *chunk]) == [(0, 20, 0), (20, 60, 2)]


def test_many_recipes_of_one_chunk(world, text):
    chunk = text(64)
    prefixes = [text(12) for _ in range(400)]
    world.add(chunk)
    for prefix in prefixes:
        world.add(chunk, recipe=world.behind(prefix))
    for prefix in prefixes[::40]:
        (match,) = world.find([*prefix, *chunk])
        assert match.recipe.prefix == tuple(prefix)
    before = world.finder.counts.pairs
    world.find([*prefixes[0], *chunk])
    assert world.finder.counts.pairs - before <= 4
