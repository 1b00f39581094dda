"""Blends over chunk KVs that went through every codec: how far the answer moves, and in which order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tiny import build, seed_of_run
from worlds import ListSource, World

from blendkv.blend import BlendSettings, blend
from blendkv.engines.torch.runner import TorchRunner
from blendkv.store import CODECS
from blendkv.store.coding import as_stored

ORDER = ("raw", "int8", "fp8", "turbo4", "turbo3", "turbo2")
"""From the smallest error to the largest."""
SETTINGS = (BlendSettings("strided", 0.0), BlendSettings("strided", 0.2), BlendSettings("head_query", 0.2))


def logits(world, codec, settings):
    """Logits of the question's rows over chunks that were stored by ``codec``."""
    chunks = [as_stored(replace(c, recipe=replace(c.recipe, codec=codec))) for c in world.chunks]
    question = len(world.prompt.segments[-1].token_ids)
    report = blend(
        world.runner, world.prompt, ListSource([world.system, *chunks, None]), world.sink(), settings, question
    )
    assert report.logits is not None
    return report.logits.double(), report


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_the_answer_moves_with_the_bits(name):
    seed = seed_of_run()
    print(f"seed {seed}")
    rng = random.Random(seed)
    runner = TorchRunner(build(name))
    moved = dict.fromkeys(ORDER, 0.0)
    for settings in SETTINGS:
        for _ in range(3):
            world = World.make(runner, rng, sizes=(40, 60, 50), recipe="bos")
            raw, spent = logits(world, "raw", settings)
            for codec in ORDER:
                found, report = logits(world, codec, settings)
                assert report.budget_spent == spent.budget_spent
                moved[codec] += float((found - raw).square().mean() / raw.var()) / 9
    print({codec: round(m**0.5, 5) for codec, m in moved.items()})
    assert set(ORDER) == set(CODECS.names())
    assert moved["raw"] == 0
    assert 0 < moved["int8"] < 0.1**2
    assert moved["int8"] < moved["fp8"] < moved["turbo4"] < moved["turbo3"] < moved["turbo2"]
    assert moved["turbo2"] < 1  # more of the answer is left than is gone


def test_all_tokens_recomputed_leave_nothing_of_the_codec():
    rng = random.Random(seed_of_run())
    runner = TorchRunner(build("llama"))
    world = World.make(runner, rng, sizes=(20, 30), recipe="bos")
    while len(world.system.token_ids) == 1:  # then the first chunk stands where it was computed: no budget touches it
        world = World.make(runner, rng, sizes=(20, 30), recipe="bos")
    found, _ = logits(world, "turbo2", BlendSettings("strided", 1.0))
    question = len(world.prompt.segments[-1].token_ids)
    assert float((found - world.full()[-question:]).abs().max()) < 1e-3
    control, _ = logits(world, "turbo2", BlendSettings("strided", 0.0))
    assert float((control - world.full()[-question:]).abs().max()) > 1e-2


def test_values_are_float32_where_the_recipe_is():
    world = World.make(TorchRunner(build("llama")), random.Random(0), sizes=(9,))
    kv = replace(world.chunks[0], recipe=replace(world.chunks[0].recipe, codec="turbo4"))
    assert {t.dtype for t in (*as_stored(kv).k, *as_stored(kv).v)} == {torch.float32}


class CodedSource(ListSource):
    """Layers of the chunks as their codec stores them."""

    def __init__(self, readers, codec):
        super().__init__(readers)
        self._codec = CODECS.get(codec)
        self.handed = 0

    def layer(self, index):
        found = list(super().layer(index))
        for place, pair in enumerate(found):
            if pair is not None and place:
                self.handed += 1
                found[place] = self._codec.encoded(self._codec.encode(*pair))
        return found


@pytest.mark.parametrize("codec", ["int8", "fp8", "turbo4"])
@pytest.mark.parametrize(
    "settings",
    [
        BlendSettings("head_query", 0.2, "trend"),
        BlendSettings("strided", 0.3, "eb"),
        BlendSettings("kv_deviation", 0.5),
    ],
    ids=lambda settings: settings.selector,
)
def test_what_is_decoded_on_the_way_is_what_was_decoded_before(codec, settings):
    seed = seed_of_run()
    print(f"seed {seed}")
    world = World.make(TorchRunner(build("llama")), random.Random(seed), sizes=(40, 60, 50), recipe="bos")
    chunks = [replace(c, recipe=replace(c.recipe, codec=codec)) for c in world.chunks]
    question = len(world.prompt.segments[-1].token_ids)
    found = []
    coded = CodedSource([world.system, *chunks, None], codec)
    for source in (ListSource([world.system, *map(as_stored, chunks), None]), coded):
        sink = world.sink()
        report = blend(world.runner, world.prompt, source, sink, settings, question)
        kv = [sink.buffer(i, report.total_tokens) for i in range(len(world.runner.layers))]
        found.append((report.logits, report.selected, kv))
    assert coded.handed >= 3 * len(world.runner.layers)
    (one, selected, kv), (other, again, like) = found
    assert torch.equal(selected, again)
    assert torch.allclose(one, other, atol=1e-4)
    for (k, v), (k_like, v_like) in zip(kv, like, strict=True):
        assert torch.allclose(k, k_like, atol=1e-4)
        assert torch.allclose(v, v_like, atol=1e-4)
