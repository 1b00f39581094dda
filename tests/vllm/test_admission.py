"""Admission on a real vLLM with a small prefix cache: who waits, for whom, for how long, and what it changes."""

from __future__ import annotations

import itertools
import random

import pytest
from blending import blending as start
from blending import close
from tiny import random_ids, seed_of_run

from blendkv.engines.vllm.stats import BlendStats

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]
BLOCK, BLOCKS = 32, 26
SMALL = {"block_size": BLOCK, "num_gpu_blocks_override": BLOCKS + 1}  # one is vLLM's own


class Load:
    """Sessions whose prompts grow, and long single shots; each engine of a test gets the same prompts."""

    def __init__(self, running, seed):
        self.running, self.rng = running, random.Random(seed)
        self.prompts = {name: random_ids(self.rng, 5 * BLOCK) for name in "abc"}

    @property
    def admission(self):
        return self.running.scheduler.admission

    def turn(self, session, tokens=4):
        """The session's next request: what it said before and a little more."""
        self.prompts[session] = self.prompts[session] + random_ids(self.rng, BLOCK)
        return self._request(self.prompts[session], tokens, workload="agent", session=session)

    def shot(self, tokens=4, blocks=13):
        return self._request(random_ids(self.rng, blocks * BLOCK), tokens, workload="single")

    def _request(self, ids, tokens, **tags):
        prompt, params = self.running.request(mode="full", salt=None, segments=None, ids=ids, tokens=tokens, **tags)
        return prompt, params

    def ask(self, *requests):
        answers = self.running.ask(*requests)
        return answers, [out.num_cached_tokens for out in self.running.last], self.told()

    def told(self):
        return [out.kv_transfer_params["blendkv"] for out in self.running.last]


@pytest.fixture(scope="module")
def seed():
    found = seed_of_run()
    print(f"seed {found}")
    return found


def scene(load):
    """Two agents at work; then, in one step, a single shot that their prefixes leave no room for, and their turns."""
    load.ask(load.turn("a"), load.turn("b"))
    load.ask(load.shot(blocks=12))  # the pool is full of what can be hit: 2 x 6, and 12
    return load.ask(load.shot(), load.turn("b"), load.turn("a"))


@pytest.fixture(scope="module")
def without(seed, tmp_path_factory):
    with start(tmp_path_factory.mktemp("without"), **SMALL) as running:
        assert running.scheduler.admission is None
        return scene(Load(running, seed))  # one engine at a time


@pytest.fixture(scope="module")
def running(without, tmp_path_factory):
    with start(tmp_path_factory.mktemp("with"), extra={"admission": True}, **SMALL) as running:
        yield running


def test_a_single_shot_waits_for_the_agents_whose_blocks_it_would_push_out(running, without, seed, monkeypatch):
    load, counted, add = Load(running, seed), [], BlendStats.add

    def noted(self, family, label, amount):
        if family.startswith("held"):
            counted.append((family, label, amount))
        add(self, family, label, amount)

    monkeypatch.setattr(BlendStats, "add", noted)
    answers, cached, told = scene(load)
    before, pushed_out, _ = without
    assert cached[1:] == [6 * BLOCK] * 2, "both agents find all that they had left"
    assert sum(pushed_out[1:]) < sum(cached[1:]), "without admission they do not: the control"
    assert (told[0]["held_for"], told[0]["held_seconds"] > 0) == ("waiting", True)
    assert not any("held_seconds" in one for one in told[1:])
    assert all(close(one, other) for one, other in zip(answers, before, strict=True)), "the answers are the same"
    assert counted == [("held", "waiting", 1), ("held_seconds", "waiting", told[0]["held_seconds"])]


def test_alone_nobody_is_held(running, seed):
    load = Load(running, seed + 1)
    load.ask(load.turn("a"), load.turn("b"))
    for _ in range(3):
        _, _, told = load.ask(load.shot(blocks=14))
        assert "held_seconds" not in told[0]


def test_two_that_would_be_held_do_not_wait_for_each_other(running, seed):
    load = Load(running, seed + 2)
    load.ask(load.turn("a"), load.turn("b"))
    answers, _, told = load.ask(load.shot(), load.shot())
    assert len(answers) == 2
    assert [one["outcome"] for one in told] == ["full", "full"]


def test_nobody_starves(running, seed):
    """Agents that come back at once, for ever: a single shot is held no longer than its class may wait."""
    load, seconds = Load(running, seed + 3), itertools.count(0.0, 0.25)
    load.ask(*(load.turn(session) for session in load.prompts))  # more than half of the pool, whoever of them runs
    now = [next(seconds)]
    core, clock = running.llm.llm_engine, load.admission._clock
    load.admission._clock = lambda: now[0]
    try:
        done = []
        core.add_request("shot", *load.shot())
        for number, session in enumerate(load.prompts):
            core.add_request(f"agent-{session}-{number}", *load.turn(session, tokens=8))
        for turn in itertools.count(3):
            now[0] = next(seconds)
            for out in (out for out in core.step() if out.finished):
                done.append(out)
                session = out.request_id.split("-")[1] if out.request_id != "shot" else ""
                if session:
                    load.prompts[session] = load.prompts[session][: 5 * BLOCK]
                    core.add_request(f"agent-{session}-{turn}", *load.turn(session, tokens=8))
            assert turn < 1000, "it starved"
            shots = [out for out in done if out.request_id == "shot"]
            if shots:
                break
        told = shots[0].kv_transfer_params["blendkv"]
        assert 1.0 < told["held_seconds"] <= 16.0 + 0.5, "the target of single shots, and the step in which it ends"
        assert len(done) > 5, "agents went on meanwhile"
    finally:
        load.admission._clock = clock
        left = list(core.engine_core.engine_core.scheduler.requests)
        core.abort_request(left, internal=True)
        core.step()
    assert not load.admission._waiting
    assert not load.admission._running


def test_an_abort_while_it_is_held_is_forgotten(running, seed):
    load = Load(running, seed + 4)
    load.ask(load.turn("a"), load.turn("b"))
    core = running.llm.llm_engine
    core.add_request("agent", *load.turn("a", tokens=30))
    core.add_request("shot", *load.shot())
    for _ in range(3):
        core.step()
    assert len(load.admission._holding) == 1
    core.abort_request(["shot", "agent"])
    core.step()
    assert not load.admission._waiting
    assert not load.admission._holding
    assert not load.admission._wanted


def test_blended_requests_are_let_in_and_answer_as_before(running):
    one = running.ask(mode="reuse", salt="one")
    agents = [{"workload": "agent", "session": f"n{number}", "salt": f"s{number}"} for number in (1, 2)]
    answers = running.ask(*(running.request(mode="reuse", **tags) for tags in agents))
    assert all(close(answer, one) for answer in answers)
    assert running.told["outcome"] == "blended"


def test_a_fault_in_it_turns_it_off_and_ends_nothing(running, monkeypatch):
    """Last: admission is off from here on."""
    plain = running.ask()
    monkeypatch.setattr(type(running.scheduler.admission), "holds", lambda self, request, computed: 1 / 0)
    assert close(running.ask(), plain)
    assert running.scheduler.admission is None
    assert running.scheduler.outcomes["admission_off"] == 1
