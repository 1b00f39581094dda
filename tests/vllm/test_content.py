"""Requests that do not say where their chunks are: matched by content, blended like those that do."""

from __future__ import annotations

import random

import pytest
from blending import blending as start
from blending import close
from tiny import random_ids
from worlds import ListSource

from blendkv.blend import parse_mode
from blendkv.matching import SlicedReader
from blendkv.types import Prompt, Segment, as_token_ids

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]
SIZES = (33, 70, 45)
MODE = "blend:strided@0.3"


@pytest.fixture(scope="module")
def blending(tmp_path_factory):
    with start(tmp_path_factory.mktemp("model"), sizes=SIZES) as running:
        running.ask(mode="reuse", salt="fill")
        running.store.flush()
        yield running


def test_the_same_as_with_boundaries(blending):
    named = blending.ask(mode=MODE, salt="named")
    assert close(blending.ask(mode=MODE, salt="found", segments=None), named)
    assert blending.told["reusable_tokens"] == sum(SIZES)
    assert blending.told["exact_tokens"] == len(blending.world.system.token_ids) + SIZES[0]


@pytest.mark.parametrize("mode", ["reuse", "blend:head_query@0.4", "blend:head_query@1"])
def test_in_another_order_with_text_between(blending, mode):
    """Chunks 3 and 1, unknown text before, between and behind them; the first tokens of one are missing."""
    world = blending.world
    rng = random.Random(7)
    texts = [random_ids(rng, n) for n in (5, 40, 9)]
    last, first = world.chunks[2], world.chunks[0]
    parts = [
        ("system", world.system.token_ids), ("history", texts[0]), ("chunk", last.token_ids[2:]),
        ("history", texts[1]), ("chunk", first.token_ids), ("query", texts[2]),
    ]  # fmt: skip
    prompt = Prompt(tuple(Segment(kind, as_token_ids(ids)) for kind, ids in parts))
    tokens, log_probs = blending.ask(mode=mode, salt="order", segments=None, ids=prompt.token_ids.tolist())
    assert blending.told["reusable_tokens"] == len(last.token_ids) - 2 + len(first.token_ids)
    source = ListSource([world.system, None, SlicedReader(last, 2, len(last.token_ids)), None, first, None])
    token, log_prob = blending.embedded(parse_mode(mode).settings, prompt, source)
    assert tokens[0] == token
    assert abs(log_probs[0] - log_prob) < 1e-3
    if mode.endswith("@1"):
        assert close(blending.ask(ids=prompt.token_ids.tolist()), (tokens, log_probs))


def test_an_unknown_chunk_in_the_middle_does_not_matter(blending):
    world = blending.world
    unknown = random_ids(random.Random(8), 50)
    ids = [*world.system.token_ids, *world.chunks[0].token_ids, *unknown, *world.chunks[1].token_ids, 5, 6, 7]
    blending.ask(mode=MODE, salt="middle", segments=None, ids=[int(t) for t in ids])
    assert blending.told["reusable_tokens"] == SIZES[0] + SIZES[1]
    assert blending.told["fresh_tokens"] == len(unknown) + 2


def test_behind_another_system_prefix_nothing_matches(blending):
    """Chunk KV that was computed behind one system message is not reused behind another."""
    ids = [9, *blending.ids]
    plain = blending.ask(ids=ids)
    assert close(blending.ask(mode=MODE, salt="other", segments=None, ids=ids), plain)
    assert blending.told.get("reusable_tokens", 0) == 0


def test_the_whole_prompt_is_one_chunk(blending):
    """A hit of everything: the last tokens are left as the question."""
    world = blending.world
    ids = [int(t) for t in (*world.system.token_ids, *world.chunks[1].token_ids)]
    plain = blending.ask(ids=ids)
    assert close(blending.ask(mode=MODE, salt="whole", segments=None, ids=ids), plain)  # first behind its own prefix
    assert blending.told["exact_tokens"] == len(ids) - 2


def test_a_chunk_that_leaves_between_plan_and_blend(blending, monkeypatch):
    plain = blending.ask()
    key = blending.library.key(blending.world.chunks[1].token_ids)
    worker = type(blending.worker.blender())
    real = worker.blend

    def without(self, load):
        self.store.remove(key)
        return real(self, load)

    with monkeypatch.context() as broken:
        broken.setattr(worker, "blend", without)
        assert close(blending.ask(mode="reuse", salt="left", segments=None), plain)
    assert blending.told["reason"] == "store"
    blending.ask(mode="reuse", salt="refill")
    assert blending.told["reusable_tokens"] == sum(SIZES)
