"""What is known of vLLM's prefix cache, on its own block pool; and the rules of who is held, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import vllm_engine  # noqa: F401 - imports vLLM without its warnings
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from blendkv.engines.vllm.admission import Admission
from blendkv.engines.vllm.holdings import Holdings
from blendkv.errors import InputError
from blendkv.market.admission import TARGETS
from blendkv.market.base import Use

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]
BLOCK = 16


class Engine:
    """Requests over a real block pool, as vLLM's scheduler takes and frees blocks; seconds pass when told."""

    def __init__(self, blocks=40, targets=None):
        self.pool = BlockPool(blocks + 1, True, BLOCK)
        self.holdings = Holdings(self.pool, [BLOCK])
        self.now = 0.0
        self.admission = Admission(self.holdings, targets, lambda: self.now)
        self.blocks: dict[str, list] = {}

    def request(self, name, words, workload="agent", session=""):
        """``words`` are what its blocks hold; equal beginnings are equal prefixes."""
        tags = {"workload": workload, **({"session": session} if session else {})}
        hashes = [f"{words[: n + 1]}".encode() for n in range(len(words))]
        return SimpleNamespace(
            request_id=name, block_hashes=hashes, num_tokens=len(words) * BLOCK,
            kv_transfer_params={"blendkv": {"mode": "full", **tags}}, all_token_ids=[], lora_request=None,
        )  # fmt: skip

    def hit(self, request):
        found = (self.pool.get_cached_block(hash, [0]) for hash in request.block_hashes)
        return [blocks[0] for blocks in iter(lambda: next(found, None), None)]

    def holds(self, request):
        return self.admission.holds(request, len(self.hit(request)) * BLOCK)

    def begin(self, request):
        hit = self.hit(request)
        missing = len(request.block_hashes) - len(hit)
        if missing > self.pool.get_num_free_blocks() - sum(block.ref_cnt == 0 for block in hit):
            return False
        self.pool.touch(hit)
        blocks = [*hit, *self.pool.get_new_blocks(missing)]
        self.pool.cache_full_blocks(request, blocks, len(hit), len(blocks), BLOCK, 0)
        self.blocks[request.request_id] = blocks
        self.admission.begins(request, [block.block_id for block in blocks])
        return True

    def end(self, request):
        blocks = self.blocks.pop(request.request_id, [])
        held = self.admission.ends(request, [block.block_id for block in blocks])
        self.pool.free_blocks(reversed(blocks))
        return held

    def run(self, *args, **tags):
        request = self.request(*args, **tags)
        self.admission.arrives(request)
        assert self.begin(request)
        self.end(request)


def leaving(engine, count, sparing=()):
    return [holding for _, holding in engine.holdings.leaving(count, sparing)]


def test_what_leaves_first_is_known_by_whom_it_is_from():
    engine = Engine(blocks=10)
    engine.run("1", "abcd", session="x")
    engine.run("2", "efg", session="y")
    assert leaving(engine, 10) == [None] * 3 + ["session x"] * 4 + ["session y"] * 3
    engine.run("3", "abcdh", session="x")
    assert leaving(engine, 10) == [None] * 2 + ["session y"] * 3 + ["session x"] * 5
    mine = {block.block_hash for block in engine.hit(engine.request("4", "ef"))}
    assert leaving(engine, 9, mine) == [None] * 2 + ["session y"] + ["session x"] * 5
    engine.run("5", "ijkl", session="z")  # two that were empty, and two of y's
    assert leaving(engine, 10) == ["session y"] + ["session x"] * 5 + ["session z"] * 4


def test_a_request_without_a_session_goes_on_where_it_builds_on_most_of_another():
    engine = Engine()
    engine.run("1", "abcdefgh", "chat")
    engine.run("2", "abcdefghij", "chat")
    assert set(leaving(engine, 40)) == {None, "request 1"}
    engine.run("3", "abcxyzuvw", "chat")  # a begin that they share makes it nobody's successor
    assert set(leaving(engine, 40)) == {None, "request 1", "request 3"}


def test_what_is_expected_of_it_is_learned_and_forgotten_with_its_last_block():
    engine = Engine(blocks=8)
    engine.run("1", "abcd", "agent", "x")
    engine.run("2", "efgh", "single")
    assert engine.holdings.worth("session x", 1.0) > 10 * engine.holdings.worth("request 2", 1.0) > 0.0
    engine.run("3", "ijklmnop", "single")
    assert not engine.holdings._ledger.entries["session x"].held
    assert set(engine.holdings._blocks) == {"request 3"}


def test_who_waits_for_a_block_makes_it_be_spared():
    engine = Engine(blocks=12)
    for number in range(3):
        engine.run(str(number), "abcd"[number] * 4, "single")
    running, shot, waiting = (
        engine.request("r", "a" * 4), engine.request("s", "z" * 8, "single"), engine.request("w", "b" * 4, "rag"),
    )  # fmt: skip
    engine.begin(running)
    assert not engine.holds(shot), "nobody expects single shots' KV to be used again"
    engine.admission.arrives(waiting)
    assert engine.holds(shot)
    assert engine.begin(waiting)
    assert engine.end(shot).reason == "waiting"


def test_the_longer_it_waits_the_less_it_is_held_for():
    engine = Engine(blocks=12)
    engine.run("1", "abcdefghijkl", "agent", "x")
    other, shot = engine.request("o", "mn", "agent", "y"), engine.request("s", "zuvwrst", "rag")
    assert engine.begin(other)
    when = []
    while engine.holds(shot):
        when.append(engine.now)
        engine.now += 0.25
    assert 1.0 < when[-1] < TARGETS["rag"]
    assert engine.end(shot).seconds == engine.now
    engine.end(other)


@pytest.mark.parametrize(
    ("targets", "why"), [({"rag": 0.0}, "target of class 'rag' is 0.0"), ({"mine": float("inf")}, "'mine' is inf")]
)
def test_targets_that_make_no_sense(targets, why):
    with pytest.raises(InputError, match=why):
        Engine(targets=targets)


EVENTS = st.tuples(
    st.sampled_from(["agent", "chat", "rag", "single", "mine"]),
    st.sampled_from(["", "x", "y", "z"]),
    st.text("abc", min_size=1, max_size=12),
    st.floats(0.0, 3.0),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, min_size=5, max_size=40))
def test_whatever_comes_somebody_runs_and_nobody_waits_too_long(events):
    engine = Engine(blocks=20)
    waiting, running = [], []
    for number, (workload, session, words, seconds, ends) in enumerate(events):
        engine.now += seconds
        request = engine.request(f"{number}", words, workload, session)
        engine.admission.arrives(request)
        waiting.append((request, engine.now))
        if ends and running:
            engine.end(running.pop(0))
        for one, arrived in list(waiting):
            if engine.holds(one):
                target = TARGETS.get(workload_of(one), TARGETS["unknown"])
                assert engine.now - arrived < target
            elif engine.begin(one):
                waiting.remove((one, arrived))
                running.append(one)
            else:
                break  # as vLLM does where there is no room
        assert running, "somebody can always run"
    for one in [*running, *(request for request, _ in waiting)]:
        engine.end(one)
    admission, holdings = engine.admission, engine.holdings
    assert not admission._waiting
    assert not admission._running
    assert not admission._holding
    assert not admission._wanted
    assert len(holdings._owned) <= 20
    assert sum(holdings._blocks.values()) == len(holdings._owned)
    assert all(count > 0 for count in holdings._blocks.values())
    held = {key for key, entry in holdings._ledger.entries.items() if entry.held}
    assert held == set(holdings._blocks)


def workload_of(request):
    return request.kv_transfer_params["blendkv"]["workload"]


def test_words_that_cannot_be_taken_are_nobodys():
    from blendkv.engines.vllm.admission import tagged

    def of(params):
        return tagged(SimpleNamespace(request_id="r", kv_transfer_params=params))

    assert of({"blendkv": {"workload": "batch", "session": "s:1"}}) == Use("batch", "s:1")
    assert of({"blendkv": {}}) == Use("rag", "")
    nobody = of(None)
    assert nobody == of({"blendkv": "x"}) == of({"blendkv": {"workload": "no word"}}) == of({"blendkv": {"session": 1}})
    assert nobody == Use("unknown", "")
