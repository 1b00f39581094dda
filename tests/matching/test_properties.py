"""The finder against a search of every chunk at every position."""

from __future__ import annotations

import random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blendkv.matching import EDGE, MIN_TOKENS

SMALL = settings(max_examples=60, deadline=None)


@st.composite
def scenes(draw):
    """Chunks with much in common, and a prompt made of them, of their parts and of other tokens."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    alphabet = range(3, 3 + draw(st.sampled_from((1, 2, 3, 1000))))

    def text(tokens):
        return [rng.choice(alphabet) for _ in range(tokens)]

    chunks = [text(rng.randint(MIN_TOKENS, 60)) for _ in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(0, 5))):
        made = list(rng.choice(chunks))
        how = rng.randrange(4)
        if how == 0:
            made[rng.randrange(len(made))] = rng.choice(alphabet)
        elif how == 1:
            made = made[rng.randint(0, 9) :] + text(rng.randint(10, 20))
        elif how == 2:
            made = made + rng.choice(chunks)
        else:
            made = (made * 2)[rng.randint(0, 30) :]
        chunks.append(made)
    chunks = [chunk for chunk in chunks if len(chunk) >= MIN_TOKENS]
    prompt = text(draw(st.integers(0, 12)))
    for _ in range(draw(st.integers(0, 6))):
        piece = list(rng.choice(chunks))
        if rng.random() < 0.5:
            piece = text(rng.randint(0, EDGE + 1)) + piece[rng.randint(0, EDGE + 1) :]
        if rng.random() < 0.5:
            piece = piece[: len(piece) - rng.randint(0, EDGE + 1)] + text(rng.randint(0, EDGE + 1))
        prompt += piece + text(rng.choice((0, 0, 1, 20)))
    return rng, chunks, prompt


@SMALL
@given(scene=scenes(), bos=st.sampled_from((None, 1)))
def test_as_many_tokens_as_there_are_to_save(new_world, oracle, scene, bos):
    _, chunks, prompt = scene
    world = new_world(bos)
    world.add(*chunks)
    matches = world.find(prompt)
    assume(world.finder.counts.pairs_dropped == 0)
    oracle(world, prompt).check(matches)


@SMALL
@given(scene=scenes())
def test_recipes(new_world, oracle, scene):
    rng, chunks, prompt = scene
    world = new_world()
    prefix = prompt[:9]
    for chunk in chunks:
        for _ in range(rng.randint(1, 3)):
            behind = rng.choice((prefix, prefix[:5], [*prefix[:-1], 2], chunks[0][:8], []))
            world.add(chunk, recipe=world.behind(behind) if behind else rng.choice((world.plain, world.start)))
    matches = world.find(prompt)
    assume(world.finder.counts.pairs_dropped == 0)
    oracle(world, prompt).check(matches)
    for match in matches:
        assert match.recipe == world.plain or tuple(prompt[: len(match.recipe.prefix)]) == match.recipe.prefix != ()


@SMALL
@given(scene=scenes())
def test_chunks_that_come_and_go(new_world, oracle, scene):
    rng, chunks, prompt = scene
    world = new_world()
    for chunk in chunks * 2:
        if world.chunks and rng.random() < 0.4:
            ids, recipe = world.chunks.pop(rng.randrange(len(world.chunks)))
            world.remove(*world.add(ids, recipe=recipe))
        else:
            world.add(chunk)
        if rng.random() < 0.5:
            world.finder.refresh()
    matches = world.find(prompt)
    assume(world.finder.counts.pairs_dropped == 0)
    oracle(world, prompt).check(matches)
