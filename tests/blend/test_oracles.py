"""Exactness on every family and every kind of RoPE, in float32, with a control that must fail."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from tiny import FAMILIES, ROPES, build, build_rope, random_ids, seed_of_run
from worlds import ListSource, World, garbage

from blendkv.blend import SELECTORS, BlendSettings, collect
from blendkv.blend.rotation import same_rotation
from blendkv.engines.torch.runner import TorchRunner
from blendkv.types import Recipe, as_token_ids, to_tensor

TOLERANCE = 1e-3
MODELS = [*FAMILIES, *(f"rope-{kind}" for kind in ROPES)]


@pytest.fixture(scope="module")
def runners():
    made = {}

    def get(name: str) -> TorchRunner:
        if name not in made:
            model = build_rope(name.removeprefix("rope-")) if name.startswith("rope-") else build(name)
            made[name] = TorchRunner(model)
        return made[name]

    return get


@pytest.fixture
def rng(request):
    seed = seed_of_run()
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize("recipe", ["system", "bos"])
@pytest.mark.parametrize("name", MODELS)
def test_budget_one_is_full_prefill(runners, rng, name, recipe):
    world = World.make(runners(name), rng, chunks=rng.choice((1, 2, 3, 5)), recipe=recipe)
    report, gap = world.blend(BlendSettings("head_query", 1.0))
    assert gap <= TOLERANCE
    assert report.recomputed_tokens + report.exact_tokens == world.stored_tokens()


@pytest.mark.parametrize("name", MODELS)
def test_the_control_fails(runners, rng, name):
    """Garbage right before the question shows, so the oracles can fail."""
    world = World.make(runners(name), rng, chunks=1)
    _, gap = world.blend(BlendSettings("strided", 0.0), ListSource([world.system, garbage(world.chunks[0]), None]))
    assert gap > 10 * TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_one_chunk_behind_its_own_prefix_is_exact_at_budget_zero(runners, rng, name):
    world = World.make(runners(name), rng, chunks=1)
    report, gap = world.blend(BlendSettings("strided", 0.0))
    assert report.budget_spent == 0.0
    if report.exact_tokens < world.stored_tokens():
        # Frequencies of dynamic NTK and LongRoPE depend on the length: KV of a short text is not exact in a long one.
        assert name in ("rope-dynamic", "rope-longrope")
        assert not same_rotation(world.runner, world.stored_tokens(), report.total_tokens)
        return
    assert gap <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_a_moved_chunk_is_the_chunk_computed_there(runners, rng, name):
    """Computed at another offset behind an empty prefix, K before RoPE and V are the same."""
    runner = runners(name)
    ids = as_token_ids(random_ids(rng, rng.randint(2, 17)))
    here = collect(runner, "tiny", Recipe("system", (), "float32"), [ids], None)[0]
    noise, seen = garbage(here), {}

    class At:
        def attend(self, layer, q, k, v, params):
            from blendkv.blend.rotation import RopeTables
            from blendkv.kernels import rotate, selected_attention

            out = selected_attention(q, k, v, torch.arange(len(ids)), params).out
            table = RopeTables(runner, positions).layer(layer)
            seen[layer] = (rotate(here.k[layer], table) - k).abs().max(), (here.v[layer] - v).abs().max(), k.abs().max()
            assert (rotate(noise.k[layer], table) - k).abs().max() > 0.01 * k.abs().max()
            return out

    # Within one frequency regime: dynamic NTK and LongRoPE change theirs with the length of the text.
    offset = rng.randint(1, 30) if name.startswith("rope-") else rng.randint(1, 400)
    positions = torch.arange(offset, offset + len(ids))
    with torch.inference_mode():
        runner.forward(to_tensor(ids), positions, At())
    assert len(seen) == len(runner.layers)
    for k_gap, v_gap, size in seen.values():
        assert k_gap <= 1e-3 * max(1.0, float(size))
        assert v_gap <= 1e-3 * max(1.0, float(size))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_every_order_of_three_chunks(runners, rng, name):
    world = World.make(runners(name), rng, chunks=3)
    segments = world.prompt.segments
    for order in itertools.permutations(range(3)):
        shuffled = replace(
            world,
            prompt=replace(world.prompt, segments=(segments[0], *(segments[1 + i] for i in order), segments[-1])),
            chunks=[world.chunks[i] for i in order],
        )
        _, gap = shuffled.blend(BlendSettings("head_query", 1.0))
        assert gap <= TOLERANCE


@pytest.mark.parametrize("selector", SELECTORS.names())
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "smollm3"])
def test_a_missing_chunk_is_computed_fresh(runners, rng, name, selector):
    """A hole in the middle is always fresh, so budget 1 stays exact and the others are reused."""
    world = World.make(runners(name), rng, chunks=3)
    report, gap = world.blend(BlendSettings(selector, 1.0), world.source(hole=1))
    assert gap <= TOLERANCE
    hole = len(world.chunks[1].token_ids)
    assert report.fresh_tokens == hole + len(world.prompt.segments[-1].token_ids)
