"""ContiguousCache: the model cannot tell it from transformers' own cache."""

from __future__ import annotations

import random

import pytest
import torch
from tiny import build, random_ids, seed_of_run
from transformers import DynamicCache

from blendkv.engines.torch.cache import ContiguousCache
from blendkv.engines.torch.runner import TorchRunner


@pytest.fixture
def rng():
    seed = seed_of_run()
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "mistral"])
def runner(request):
    return TorchRunner(build(request.param))


def step(model, cache, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits


def test_equals_the_own_cache_in_any_steps(runner, rng):
    """Prompts beyond the sliding window, then pieces of one or many tokens, from a capacity that must grow."""
    ours = ContiguousCache(runner.layers, rng.choice((0, 1, 5)), torch.float32, torch.device("cpu"))
    theirs = DynamicCache(config=runner.config)
    for length in (rng.randint(1, 30), 1, rng.randint(2, 20), 1, 1, rng.randint(1, 5)):
        ids = random_ids(rng, length)
        gap = (step(runner.model, ours, ids) - step(runner.model, theirs, ids)).abs().max()
        assert gap < 1e-4
    assert ours.length == ours.get_seq_length() == theirs.get_seq_length()


def test_crop_forgets(runner, rng):
    ids, more = random_ids(rng, 40), random_ids(rng, 7)
    cache = ContiguousCache(runner.layers, 64, torch.float32, torch.device("cpu"))
    step(runner.model, cache, [*ids, *random_ids(rng, 13)])
    cache.crop_to(len(ids))
    fresh = ContiguousCache(runner.layers, 64, torch.float32, torch.device("cpu"))
    step(runner.model, fresh, ids)
    assert cache.length == fresh.length == 40
    assert (step(runner.model, cache, more) - step(runner.model, fresh, more)).abs().max() < 1e-4
    cache.crop_to(1000)
    assert cache.length == 47
    cache.layers[0].crop(-3)
    assert cache.layers[0].length == 44
    cache.layers[0].reset()
    assert cache.layers[0].length == 0


def test_buffer_is_the_cache(runner):
    cache = ContiguousCache(runner.layers, 2, torch.float32, torch.device("cpu"))
    for layer, spec in enumerate(runner.layers):
        k, v = cache.buffer(layer, 11)
        assert k.shape == (11, spec.kv_heads, spec.head_dim)
        assert v.shape == (11, spec.kv_heads, spec.v_head_dim)
        k.fill_(layer + 1)
        v.fill_(-layer - 1)
        cache.commit(layer, 11)
        assert cache.length == 0
    cache.finish(11)
    assert cache.length == 11
    for layer, place in enumerate(cache.layers):
        assert (place.keys[0, :, :11] == layer + 1).all()
        assert (place.values[0, :, :11] == -layer - 1).all()
    # More room keeps what is filled.
    cache.buffer(0, 500)
    assert (cache.layers[0].keys[0, :, :11] == 1).all()
    assert cache.layers[0].keys.shape[2] >= 500
    assert cache.nbytes == sum(t.nbytes for x in cache.layers for t in (x.keys, x.values))
