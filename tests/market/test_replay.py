"""The cache simulator: replays worked out by hand, and what holds for every trace and policy."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Container, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.errors import BlendKVError, InputError
from blendkv.market.base import Item, Use
from blendkv.market.costs import CostModel
from blendkv.market.hints import Hinted
from blendkv.market.replay import Cache, KeepsAll, Slower, Timed, replay
from blendkv.market.trace import Block, Request, Trace

COSTS = CostModel(linear=1.0, quadratic=0.0, load_rate=10.0, load_latency=0.0, token_bytes=1, blend_budget=0.25)
"""A token takes 1 s to compute and 0.1 s to load; a quarter of a chunk is recomputed."""
USE = Use("chat", "s")


class Lru:
    """Recency, and a list of all that it was told."""

    def __init__(self) -> None:
        self.held: OrderedDict[str, Item] = OrderedDict()
        self.told: list[tuple[str, str]] = []
        self.refuse: set[str] = set()

    def added(self, key: str, item: Item, use: Use, now: float) -> None:
        assert key not in self.held
        self.told.append(("added", key))
        self.held[key] = item

    def touched(self, key: str, use: Use, now: float) -> None:
        self.told.append(("touched", key))
        self.held.move_to_end(key)

    def removed(self, key: str, now: float) -> None:
        self.told.append(("removed", key))
        del self.held[key]

    def victims(self, nbytes: int, keep: Container[str], now: float) -> list[str]:
        chosen: list[str] = []
        for key, item in self.held.items():
            if nbytes <= 0:
                break
            if key not in keep:
                chosen.append(key)
                nbytes -= item.nbytes
        return chosen

    def admits(self, key: str, item: Item, use: Use, leaving: Sequence[str], now: float) -> bool:
        self.told.append(("asked", key))
        return key not in self.refuse


class Listener(Lru):
    """With the optional call."""

    def hint(self, session: str, what: str, ttl: float, now: float) -> None:
        self.told.append((what, f"{session} {ttl:g} at {now:g}"))


def prefix(*names: str, tokens: int = 10) -> tuple[Block, ...]:
    return tuple(Block(name, tokens) for name in names)


def ask(at: float, *names: str, fresh: int = 0, made: tuple[str, ...] = (), use: Use = USE) -> Request:
    return Request(at, use, prefix(*names), fresh=fresh, made=prefix(*made))


def test_a_conversation_by_hand() -> None:
    """Room for 40 tokens. Each block of 10 takes 10 s to compute, 1 s to load."""
    policy = Lru()
    cache = Cache(40, policy, COSTS)
    # 20 + 5 tokens: all computed. Stored: a, b, and c made of the 5 fresh tokens and 5 of the answer.
    found = cache.serve(ask(0, "a", "b", fresh=5, made=("c",)), 0)
    assert found == (25.0, 0.0, 20, 0)
    assert list(policy.held) == ["c", "b", "a"]  # from the end to the begin: c leaves first
    assert [policy.held[key].after for key in "abc"] == ["", "a", "b"]
    # The next turn: a, b, c are hits, 3 x (10 - 1) s saved of 35. d makes 40 tokens: nothing leaves.
    found = cache.serve(ask(1, "a", "b", "c", fresh=5, made=("d",)), 1)
    assert found == (35.0, 27.0, 30, 30)
    assert found.seconds == 8.0
    assert (cache.used, list(policy.held)) == (40, ["d", "c", "b", "a"])
    # Another prompt needs 20: d and c, the tail, leave.
    cache.serve(ask(2, "x", "y", use=Use("single")), 2)
    assert list(policy.held) == ["b", "a", "y", "x"]
    # The session comes back: a and b hit; c, d miss and are computed anew, for which y and x leave: regretted both.
    found = cache.serve(ask(3, "a", "b", "c", "d"), 3)
    assert found == (40.0, 18.0, 40, 20)
    chat, single = cache.tallies["chat"], cache.tallies["single"]
    assert (chat.requests, chat.hit, chat.asked, chat.evictions, chat.regretted) == (3, 50, 90, 2, 2)
    assert (single.requests, single.hit, single.evictions, single.written, single.regretted) == (1, 0, 2, 20, 0)
    assert chat.plus(single).written == 80
    assert chat.hit_rate == 50 / 100  # of prompt tokens: 25 + 35 + 40


def test_a_broken_prefix_is_no_hit_behind_the_gap() -> None:
    policy = Lru()
    cache = Cache(40, policy, COSTS)
    cache.serve(ask(0, "a", "b", "c"), 0)
    cache.used -= cache.held.pop("b")
    policy.removed("b", 0)
    found = cache.serve(ask(1, "a", "b", "c"), 1)
    assert (found.hit, found.saved) == (10, 9.0)  # a alone, though c is held
    assert set(cache.held) == {"a", "b", "c"}
    assert policy.told[-3:] == [("touched", "c"), ("added", "b"), ("touched", "a")]


def test_chunks_hit_in_any_order_and_pay_the_blend() -> None:
    cache = Cache(100, Lru(), COSTS)
    chunks = prefix("x", "y", "z")
    cache.serve(Request(0, Use("rag"), prefix("sys"), chunks, fresh=4), 0)
    found = cache.serve(Request(1, Use("rag"), prefix("sys"), (chunks[2], Block("w", 10), chunks[0]), fresh=4), 1)
    # sys: 10 - 1 s. z and x: three quarters of 10 s, less 1 s for the load. w is computed.
    assert found == (44.0, 9.0 + 2 * 6.5, 40, 30)
    # Without its system prefix, too: chunks do not need it.
    found = cache.serve(Request(2, Use("rag"), prefix("other"), chunks), 2)
    assert (found.hit, found.saved) == (30, 19.5)


def test_attention_makes_later_blocks_dearer() -> None:
    costs = CostModel(linear=1.0, quadratic=0.2, load_rate=1e9, load_latency=0.0, token_bytes=1)
    policy = Lru()
    cache = Cache(100, policy, costs)
    found = cache.serve(ask(0, "a", "b", fresh=2), 0)
    assert found.total == pytest.approx(22 + 0.2 * 22 * 22 / 2)
    # a stands at 0: 10 + 0.2 x 50. b behind it: 10 + 0.2 x (100 + 50).
    assert [policy.held[key].saved for key in "ab"] == [pytest.approx(20.0), pytest.approx(40.0)]


def test_where_loading_is_slower_than_computing_nothing_is_saved() -> None:
    cache = Cache(100, Lru(), CostModel(1.0, 0.0, load_rate=0.5, load_latency=0.0, token_bytes=1))
    cache.serve(ask(0, "a"), 0)
    found = cache.serve(ask(1, "a"), 1)
    assert (found.hit, found.saved, found.seconds) == (10, 0.0, 10.0)


def test_behind_a_refused_block_no_prefix_is_stored_but_chunks_are() -> None:
    policy = Lru()
    policy.refuse = {"b"}
    cache = Cache(100, policy, COSTS)
    cache.serve(Request(0, USE, prefix("a", "b", "c"), prefix("x")), 0)
    assert set(cache.held) == {"a", "x"}
    assert policy.told == [("asked", "a"), ("asked", "b"), ("asked", "x"), ("added", "x"), ("added", "a")]


def test_blocks_of_the_running_request_stay() -> None:
    """c needs room, and all that could leave belongs to the prompt that c ends."""
    cache = Cache(25, Lru(), COSTS)
    cache.serve(ask(0, "a", "b"), 0)
    cache.serve(ask(1, "a", "b", "c"), 1)
    assert set(cache.held) == {"a", "b"}


def test_a_tier_behind_saves_what_it_can_and_lowers_the_worth_of_a_hit() -> None:
    policy = Lru()
    cache = Cache(10, policy, COSTS, Slower(load_rate=2.0, load_latency=0.0))
    cache.serve(ask(0, "a"), 0)
    assert policy.held["a"].saved == 4.0  # loading takes 1 s here, 5 s from behind, computing 10 s
    cache.serve(ask(1, "b"), 1)  # a leaves
    found = cache.serve(ask(2, "a"), 2)
    assert (found.hit, found.saved) == (0, 5.0)
    assert cache.serve(ask(3, "a"), 3) == (10.0, 9.0, 10, 10)


def test_hints_are_told_to_who_listens() -> None:
    policy = Listener()
    turn = Request(0, USE, prefix("a"), fresh=5, made=prefix("b"), hint="tool_started", ttl=30)
    again = Request(7, USE, prefix("a", "b"), fresh=5, made=prefix("c"), hint="session_ended")
    replay(Trace("t", (turn, again)), Cache(100, policy, COSTS))
    assert [t for t in policy.told if t[0] not in ("asked", "added", "touched")] == [
        ("tool_started", "s 30 at 0"), ("tool_finished", "s 0 at 7"), ("session_ended", "s 0 at 7"),
    ]  # fmt: skip


def test_a_timed_policy_is_the_same_policy() -> None:
    trace = Trace("t", (ask(0, "a", "b"), ask(1, "a", "c")))
    timed = Timed(Listener())
    assert isinstance(timed, Hinted)
    assert not isinstance(Timed(Lru()), Hinted)
    plain = replay(trace, Cache(20, Listener(), COSTS)).all
    assert replay(trace, Cache(20, timed, COSTS)).all == plain  # type: ignore[arg-type]
    assert timed.calls > 0
    assert timed.seconds > 0


class Liar(Lru):
    def victims(self, nbytes: int, keep: Container[str], now: float) -> list[str]:
        return [*super().victims(nbytes, (), now)]


def test_a_policy_that_names_what_is_in_use_is_an_error() -> None:
    cache = Cache(25, Liar(), COSTS)
    cache.serve(ask(0, "a", "b"), 0)
    with pytest.raises(BlendKVError, match="Liar names b"):
        cache.serve(ask(1, "a", "b", "c"), 1)


def test_wrong_input() -> None:
    with pytest.raises(InputError, match="capacity is -1"):
        Cache(-1, Lru(), COSTS)


def random_trace(seed: int, requests: int = 60) -> Trace:
    """Sessions, chunks and one-offs over few blocks of many sizes."""
    rng = random.Random(seed)
    chunks = [Block(f"chunk{n}", rng.randint(1, 600)) for n in range(12)]
    histories: dict[str, tuple[Block, ...]] = {}
    made: list[Request] = []
    for number in range(requests):
        session = f"s{rng.randrange(5)}"
        history = histories.get(session, (Block(f"sys{rng.randrange(2)}", 64),))
        if rng.random() < 0.4:
            made.append(Request(number, Use("rag"), history[:1], tuple(rng.sample(chunks, 4)), fresh=rng.randint(0, 9)))
        else:
            own = tuple(Block(f"{number}/{n}", rng.randint(1, 512)) for n in range(rng.randint(1, 3)))
            made.append(Request(number, Use("chat", session), history, (), rng.randint(1, 9), 5, own))
            histories[session] = history + own
    return Trace(f"random {seed}", tuple(made)).check()


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), share=st.floats(0.0, 1.0), slower=st.booleans())
def test_what_always_holds(seed: int, share: float, slower: bool) -> None:
    """Bytes within the capacity, tokens and seconds that add up, the policy's view and the cache's the same."""
    trace = random_trace(seed)
    policy = Lru()
    cache = Cache(int(trace.distinct_tokens * share), policy, COSTS, Slower(1.0, 0.5) if slower else None)
    asked = hit = written = 0
    for request in trace:
        before = cache.peek(request)
        found = cache.serve(request, request.arrival)
        assert found == before
        assert 0 <= found.hit <= found.asked == request.tokens - request.fresh
        assert 0 <= found.saved <= found.total
        assert sum(cache.held.values()) == cache.used <= cache.capacity
        assert {key: item.nbytes for key, item in policy.held.items()} == cache.held
        asked, hit = asked + found.asked, hit + found.hit
    total = replay(trace, Cache(cache.capacity, Lru(), COSTS, Slower(1.0, 0.5) if slower else None)).all
    assert (total.asked, total.hit, total.requests) == (asked, hit, len(trace))
    left = sum(t.evictions for t in cache.tallies.values())
    assert len(cache.held) + left == sum(1 for what, _ in policy.told if what == "added")
    written = sum(t.written for t in cache.tallies.values())
    assert written >= cache.used


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_a_cache_that_holds_everything_hits_what_was_seen(seed: int) -> None:
    trace = random_trace(seed)
    seen: set[str] = set()
    hit = 0
    for request in trace:
        whole = True
        for block in request.prefix:
            whole = whole and block.key in seen
            hit += block.tokens if whole else 0
        hit += sum(block.tokens for block in request.chunks if block.key in seen)
        seen |= {block.key for block in (*request.prefix, *request.chunks, *request.made)}
    capacity = trace.distinct_tokens
    for policy in (Lru(), KeepsAll()):
        result = replay(trace, Cache(capacity, policy, COSTS)).all
        assert (result.hit, result.evictions, result.regretted) == (hit, 0, 0)
        assert result.written == capacity
    none = replay(trace, Cache(0, KeepsAll(), COSTS)).all
    assert (none.hit, none.written, none.saved) == (0, 0, 0.0)
