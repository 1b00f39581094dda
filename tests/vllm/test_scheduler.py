"""The scheduler's half alone: waits, bounds, worth, and what is counted."""

from __future__ import annotations

import base64
import random
import time
from types import SimpleNamespace

import pytest
import vllm_engine  # noqa: F401 - imports vLLM without its warnings
from tiny import random_ids, seed_of_run

from blendkv.engines.vllm.messages import NotBlendedError, WorkerReport
from blendkv.engines.vllm.plan import Facts, Planner
from blendkv.engines.vllm.scheduler import BlendScheduler
from blendkv.engines.vllm.settings import ConnectorSettings
from blendkv.errors import InputError, StoreError
from blendkv.market.base import NOBODY, Use
from blendkv.matching import Match
from blendkv.tenants import tenant_tag
from blendkv.types import Recipe, as_token_ids, chunk_key

pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]
MODE = "blend:strided@0.1"


def match(kind, start, stop, key, first):
    """A match whose chunk is as long as it takes; the scheduler only hands its ids on."""
    return Match(kind, start, stop, key, first, Recipe("bos", (1,), "float32"), as_token_ids(range(stop)))


class Store:
    """What the scheduler asks a store, over a set of keys."""

    def __init__(self):
        self.keys: set[str] = set()
        self.asked = 0
        self.error: Exception | None = None

    def contains(self, key, token_ids):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return key in self.keys


class Ahead:
    """A prefetcher whose reads end when told so."""

    def __init__(self):
        self.done = True
        self.dropped: list[str] = []
        self.uses: dict[str, Use] = {}
        self.error: Exception | None = None

    def ready(self, request_id, chunks, use):
        self.uses[request_id] = use
        if self.error is not None:
            raise self.error
        return self.done

    def drop(self, request_id):
        self.dropped.append(request_id)

    def close(self):
        pass


class World:
    def __init__(self, **settings):
        seed = seed_of_run()
        print(f"seed {seed}")
        self.rng = random.Random(seed)
        self.store, self.ahead, self.found, self.refreshed = Store(), Ahead(), [], 0
        self.settings = ConnectorSettings.read({"store": "unused", "mode": MODE, **settings})
        planner = Planner(self.settings, Facts("model", "float32", 1, True), self.store, self)
        step = self.settings.step_tokens or 4096
        self.scheduler = BlendScheduler(self.settings, planner, self.ahead, step, self.refresh)
        self.prefix = tuple(random_ids(self.rng, 10))

    def find(self, ids, tenant=""):
        return self.found

    def refresh(self):
        self.refreshed += 1

    def keep(self, chunk):
        """Say that the store holds a chunk behind the prefix."""
        self.store.keys.add(chunk_key("model", Recipe("system", self.prefix, "float32"), as_token_ids(chunk)))

    def request(self, name, chunks, boundaries=True, question=8, **more):
        ids = [*self.prefix, *(t for c in chunks for t in c), *random_ids(self.rng, question)]
        segments = [["system", len(self.prefix)], *(["chunk", len(c)] for c in chunks), ["query", question]]
        wanted = {"mode": MODE, **({"segments": segments} if boundaries else {}), **more}
        return SimpleNamespace(
            request_id=name, prompt_token_ids=ids, num_prompt_tokens=len(ids), cache_salt=f"{MODE}|x",
            kv_transfer_params={"blendkv": wanted}, lora_request=None, prompt_embeds=None, mm_features=[],
            sampling_params=object(), skip_reading_prefix_cache=False,
        )  # fmt: skip

    def chunks(self, count, size=100, kept=True):
        made = [random_ids(self.rng, size) for _ in range(count)]
        for chunk in made if kept else ():
            self.keep(chunk)
        return made

    def step(self, request=None, blocks=((1, 2, 3),), tokens=None):
        """One scheduling step; what the request was answered, and the worker's work."""
        answer = None
        if request is not None:
            answer = self.scheduler.matched(request, 0)
            if answer:
                self.scheduler.allocated(request, tuple(list(b) for b in blocks), answer)
        return answer, self.scheduler.metadata(tokens or {})


def test_a_stored_request_is_blended_at_once():
    world = World()
    request = world.request("a", world.chunks(3))
    answer, work = world.step(request)
    assert answer == request.num_prompt_tokens - 1
    assert work.loads[0].request_id == "a"
    assert [p.tokens for p in work.loads[0].pieces] == [10, 100, 100, 100, 7]
    assert world.scheduler.finished(request) == {"outcome": "blended", "reason": None, "mode": MODE}
    assert world.scheduler.outcomes == {"blended": 1}
    assert world.ahead.dropped == ["a"]


def test_asking_again_costs_nothing():
    """A waiting request is polled every step: it is planned once, and the finder is refreshed once per step."""
    world = World()
    world.ahead.done = False
    requests = [world.request(f"r{i}", world.chunks(2)) for i in range(3)]
    for _ in range(5):
        assert [world.scheduler.matched(r, 0) for r in requests] == [None] * 3
        world.scheduler.metadata({})
    assert world.store.asked == 3 * 3
    assert world.refreshed == 1
    world.ahead.done = True
    assert world.scheduler.matched(requests[0], 0) == requests[0].num_prompt_tokens - 1


@pytest.mark.parametrize("error", [StoreError("away"), TimeoutError("slow")])
def test_reading_ahead_fails(error):
    world = World()
    request = world.request("a", world.chunks(2))
    world.ahead.error = error
    assert world.step(request)[0] == 0
    reason = world.scheduler.finished(request)["reason"]
    assert reason == ("store" if isinstance(error, StoreError) else "store_slow")
    world.ahead.error = None
    assert world.step(world.request("b", world.chunks(2)))[0] > 0


def test_an_index_that_fails_is_asked_again_by_the_next_request():
    world = World()
    chunks = world.chunks(2)
    world.store.error = StoreError("the index is away")
    request = world.request("a", chunks)
    assert world.step(request)[0] == 0
    assert world.scheduler.finished(request)["reason"] == "store"
    world.store.error = None
    assert world.step(world.request("b", chunks))[0] > 0


def test_blends_are_bounded_per_step():
    """Every request runs 3 + 30 + 7 rows here; a step takes 100, and at least one blend."""
    world = World(step_tokens=100)
    requests = [world.request(f"r{i}", world.chunks(3)) for i in range(5)]
    world.store.keys.add(chunk_key("model", Recipe("system", (), "float32"), as_token_ids(world.prefix)))
    taken = []
    waiting = list(requests)
    while waiting:
        step = []
        for request in list(waiting):
            answer = world.scheduler.matched(request, 0)
            assert answer is None or answer > 0
            if answer:
                world.scheduler.allocated(request, ([1, 2],), answer)
                waiting.remove(request)
                step.append(request.request_id)
        assert len(world.scheduler.metadata({}).loads) == len(step)
        taken.append(step)
    assert taken == [["r0", "r1"], ["r2", "r3"], ["r4"]]


def test_a_blend_larger_than_a_step_is_prefilled():
    world = World(step_tokens=100)
    request = world.request("a", world.chunks(3), question=90)
    assert world.step(request)[0] == 0
    assert world.scheduler.finished(request)["reason"] == "step_tokens"


def test_a_missing_chunk_is_computed_in_the_step_before():
    world = World(compute_tokens=128)
    chunks = [*world.chunks(3), *world.chunks(1, size=70, kept=False)]
    request = world.request("a", chunks)
    answer, work = world.step(request)
    assert answer is None
    assert [c.chunks for c in work.computes] == [(tuple(chunks[-1]),)]
    assert work.computes[0].prefix == world.prefix
    answer, work = world.step(request)
    assert answer == request.num_prompt_tokens - 1
    assert not work.computes


def test_many_missing_chunks_take_several_steps():
    world = World(compute_tokens=150)
    chunks = [*world.chunks(9), *world.chunks(4, size=70, kept=False)]
    request = world.request("a", chunks)
    steps = []
    while not (answered := world.step(request))[0]:
        steps.append(sum(c.tokens for c in answered[1].computes))
    assert steps == [140, 140]


def test_what_is_not_worth_it_is_prefilled_and_computed_when_there_is_time():
    world = World(compute_tokens=150)
    chunks = world.chunks(3, kept=False)
    request = world.request("a", chunks)
    answer, work = world.step(request, tokens={"a": 318})  # the prefill runs in this step
    assert answer == 0
    assert not work.computes
    assert world.scheduler.has_work
    assert world.scheduler.finished(request)["reason"] == "nothing_stored"
    done = []
    while world.scheduler.has_work:
        _, work = world.step(tokens={"b": 1})  # others decode
        done += [c for compute in work.computes for c in compute.chunks]
    assert done == [tuple(c) for c in chunks]


def test_little_stored_and_local_prefix():
    world = World()
    request = world.request("a", [*world.chunks(1), *world.chunks(6, kept=False)])
    assert world.step(request)[0] == 0
    assert world.scheduler.finished(request)["reason"] == "little_stored"
    request = world.request("b", world.chunks(3))
    assert world.scheduler.matched(request, request.num_prompt_tokens - 12) == 0
    assert world.scheduler.finished(request) == {"outcome": "prefix", "reason": "prefix", "mode": MODE}


def test_matched_by_content():
    world = World()
    chunk = world.chunks(1, size=200)[0]
    request = world.request("a", [chunk, random_ids(world.rng, 20)], boundaries=False)
    world.found = [match("system", 0, 10, "k0", 0), match("chunk", 12, 208, "k1", 2)]
    answer, work = world.step(request)
    assert answer == request.num_prompt_tokens - 1
    assert [(p.kind, p.tokens, p.key, p.first) for p in work.loads[0].pieces] == [
        ("system", 10, "k0", 0), ("history", 2, None, 0), ("chunk", 196, "k1", 2), ("query", 29, None, 0),
    ]  # fmt: skip


def test_a_match_up_to_the_end_leaves_a_question():
    world = World()
    request = world.request("a", world.chunks(1, size=200), boundaries=False, question=2)
    world.found = [match("chunk", 10, 211, "k1", 0)]
    _, work = world.step(request)
    assert [(p.kind, p.tokens) for p in work.loads[0].pieces] == [("history", 10), ("chunk", 200), ("query", 1)]


def test_every_request_only_when_told_so():
    for everyone in (False, True):
        world = World(all_requests=everyone)
        request = world.request("a", world.chunks(1, size=200), boundaries=False)
        request.kv_transfer_params, request.cache_salt = None, None
        world.found = [match("chunk", 10, 210, "k1", 0)]
        assert bool(world.step(request)[0]) is everyone
        assert (world.scheduler.finished(request) is None) is not everyone
        other = world.request("b", world.chunks(1, size=200), boundaries=False, mode="reuse")
        other.cache_salt = None
        assert world.step(other)[0] == 0
        assert world.scheduler.finished(other)["reason"] == "cache_salt"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lora_request": object()}, "lora"),
        ({"mm_features": [object()]}, "multimodal"),
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"prompt_token_ids": None}, "prompt_embeds"),
        ({"sampling_params": None}, "pooling"),
        ({"skip_reading_prefix_cache": True}, "prompt_logprobs"),
    ],
)
def test_kinds_of_requests_that_are_not_blended(change, reason):
    world = World()
    request = world.request("a", world.chunks(2), boundaries=False)
    vars(request).update(change)
    assert world.step(request)[0] == 0
    assert world.scheduler.finished(request)["reason"] == reason


def test_what_the_worker_says():
    world = World()
    chunks = world.chunks(2)
    good, bad = world.request("a", chunks), world.request("b", chunks)
    world.step(good)
    world.step(bad)
    done = {
        "reusable_tokens": 200,
        "recomputed_tokens": 20,
        "fresh_tokens": 7,
        "bytes_loaded": 9,
        "stages": {"load": 1.0},
    }
    world.scheduler.heard(WorkerReport({"a": done}, {"b": "store"}))
    assert world.scheduler.matched(bad, 0) == 0
    assert world.scheduler.finished(good) == {"outcome": "blended", "reason": None, "mode": MODE, **done}
    assert world.scheduler.finished(bad)["reason"] == "store"
    assert world.scheduler.stats.data["tokens"] == {"reused": 180, "recomputed": 20, "fresh": 7}
    assert world.scheduler.stats.data["requests"] == {"blended": 1, "store": 1}
    world.scheduler.heard(WorkerReport(refused="it has ALiBi"))
    assert world.step(request := world.request("c", chunks))[0] == 0
    assert world.scheduler.finished(request)["reason"] == "model"


def test_words_of_clients_do_not_become_labels_and_reach_the_work():
    world = World()
    for number, workload in enumerate(("agent", "made-up", "also.made.up", "chat")):
        request = world.request(f"{number}", world.chunks(3), workload=workload, session="s:1")
        _, work = world.step(request)
        assert world.ahead.uses[request.request_id] == work.loads[0].use == Use(workload, "s:1")
        world.scheduler.finished(request)
    assert world.scheduler.stats.data["workloads"] == {"agent": 1, "other": 2, "chat": 1}


def test_a_missing_chunk_is_computed_once_for_whoever_asked_first():
    world = World(min_saving=-1)
    chunks = world.chunks(1, kept=False)
    for number, session in enumerate("ab"):
        world.scheduler.matched(world.request(f"{number}", chunks, workload="agent", session=session), 0)
    computes = world.scheduler.metadata({}).computes
    assert [(compute.chunks, compute.use) for compute in computes] == [((tuple(chunks[0]),), Use("agent", "a"))]


def test_an_aborted_request_is_forgotten():
    world = World()
    world.ahead.done = False
    request = world.request("a", world.chunks(2))
    world.step(request)
    assert world.scheduler.finished(request)["reason"] == "aborted"
    assert world.scheduler.finished(request) is None
    assert world.ahead.dropped == ["a", "a"]


def test_what_was_read_is_not_read_again(tmp_path):
    """Workers in other processes: the scheduler keeps nothing, and remembers as much as they have room for."""
    import torch

    from blendkv.engines.vllm.prefetch import Prefetcher
    from blendkv.store.tiered import KVStore
    from blendkv.types import ChunkKV

    def chunk(first):
        ids = as_token_ids(range(first, first + 10))
        return ChunkKV("model", Recipe("bos", (1,), "float32"), ids, (torch.randn(10, 2, 8),), (torch.randn(10, 2, 8),))

    kvs = [chunk(first) for first in (10, 30, 50)]
    with KVStore.open(tmp_path / "s", memory_bytes=0) as store:
        for kv in kvs:
            store.put(kv)
        reads = []
        get = store.get
        store.get = lambda key, ids: reads.append(key) or get(key, ids)
        ahead = Prefetcher(store, 10.0, remembered_bytes=2 * kvs[0].nbytes)
        for number, kv in enumerate((*kvs, kvs[2], kvs[1], kvs[0])):
            while not ahead.ready(f"r{number}", [(kv.key, kv.token_ids)], NOBODY):
                time.sleep(0.01)
        assert reads == [kv.key for kv in (*kvs, kvs[0])]
        ahead.close()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, "needs kv_connector_extra_config"),
        ({"store": "s", "colour": 1}, r"unknown .*\['colour'\].*allowed: store"),
        ({"store": "s", "mode": "full"}, "give reuse or blend"),
        ({"store": "s", "memory": "much"}, "much"),
        ({"store": "s", "step_tokens": 0}, "step_tokens is 0; more than 0"),
        ({"store": "s", "min_saving": 1}, "less than 1"),
        ({"store": "s", "compute_tokens": "x"}, "wrong type"),
        ({"store": "s", "require_gate": "yes"}, "require_gate is 'yes'; true or false"),
        ({"store": "s", "admission": 1}, "admission is 1; true or false"),
        ({"store": "s", "targets": {"rag": 2.0}}, "without admission"),
        ({"store": "s", "admission": True, "targets": {"rag": -1.0}}, "target of class 'rag' is -1.0"),
        ({"store": "s", "admission": True, "targets": {"rag": "x"}}, "wrong type"),
        ({"store": "s", "policy": "best"}, "best"),
        ({"store": "s", "require_gate": True, "ignore_gate": True}, "both set"),
    ],
)
def test_options_of_the_connector(extra, words):
    with pytest.raises(InputError, match=words):
        ConnectorSettings.read(extra)


def test_a_plan_is_cheap():
    """Not a timing test: the work per poll of a waiting request is a few dictionary look-ups, whatever its length."""
    world = World()
    request = world.request("a", world.chunks(20, size=400))
    world.step(request)
    asked = world.store.asked
    began = time.perf_counter()
    for _ in range(100):
        world.scheduler.matched(request, 0)
    print(f"{(time.perf_counter() - began) / 100 * 1e6:.0f} us per poll of {request.num_prompt_tokens} tokens")
    assert world.store.asked == asked


TAG = "ab" * 16


def of_tenant(world, request, tag=TAG):
    request.kv_transfer_params["blendkv"]["tenant"] = tag
    request.cache_salt = f"{MODE}|{tag}|x"
    return request


def test_a_tenants_request_uses_the_tenants_chunks_only():
    world = World()
    chunks = world.chunks(2, size=200)
    wanted, work = world.step(of_tenant(world, world.request("a", chunks)))
    assert not wanted
    assert world.scheduler.finished(SimpleNamespace(request_id="a"))["reason"] == "nothing_stored"
    for chunk in chunks:
        recipe = Recipe("system", world.prefix, "float32", tenant=TAG)
        world.store.keys.add(chunk_key("model", recipe, as_token_ids(chunk)))
    wanted, work = world.step(of_tenant(world, world.request("b", chunks)))
    assert wanted
    assert work.loads[0].tenant == TAG


def test_missing_chunks_are_computed_for_their_tenant():
    world = World(min_saving=-1)
    chunks = world.chunks(1, size=200, kept=False)
    world.scheduler.matched(of_tenant(world, world.request("a", chunks)), 0)
    world.scheduler.matched(world.request("b", chunks), 0)
    computes = [c for _ in range(2) for c in world.scheduler.metadata({}).computes]
    assert sorted((c.tenant, c.chunks) for c in computes) == [(tag, (tuple(chunks[0]),)) for tag in ("", TAG)]


@pytest.mark.parametrize(
    ("tag", "salt", "reason"),
    [
        (TAG, f"{MODE}|x", "cache_salt"),
        (TAG, MODE, "cache_salt"),
        (TAG, None, "cache_salt"),
        (TAG, f"{MODE}|{'cd' * 16}", "cache_salt"),
        ("acme", f"{MODE}|acme", "parameters"),
        (7, f"{MODE}|7", "parameters"),
    ],
)
def test_a_salt_that_does_not_name_the_tenant_is_refused(tag, salt, reason):
    """Else vLLM's prefix cache would hand one tenant's KV to another."""
    world = World()
    request = of_tenant(world, world.request("a", world.chunks(1, size=200)), tag)
    request.cache_salt = salt
    assert not world.step(request)[0]
    assert world.scheduler.finished(request)["reason"] == reason


def test_the_processs_own_tenant_is_that_of_requests_that_name_none(monkeypatch):
    monkeypatch.setenv("BLENDKV_TENANT_SALT", base64.b64encode(bytes(range(32))).decode())
    settings = ConnectorSettings.read({"store": "unused", "mode": MODE, "tenant": "acme", "all_requests": True})
    tag = tenant_tag("acme")
    assert settings.tag == tag
    world = World()
    asked = []
    finder = SimpleNamespace(find=lambda ids, tenant="": asked.append(tenant) or [])
    planner = Planner(settings, Facts("model", "float32", 1, True, "raw", tag), world.store, finder)
    request = world.request("a", world.chunks(1, size=200), boundaries=False)
    request.kv_transfer_params, request.cache_salt = None, None
    planner.plan(request)
    other = of_tenant(world, world.request("b", world.chunks(1, size=200), boundaries=False))
    planner.plan(other)
    assert asked == [tag, TAG]
    other.cache_salt = None
    with pytest.raises(NotBlendedError, match="cache_salt must begin"):
        planner.plan(other)


def test_a_tenant_without_a_salt_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.delenv("BLENDKV_TENANT_SALT", raising=False)
    with pytest.raises(InputError, match="BLENDKV_TENANT_SALT is not set"):
        ConnectorSettings.read({"store": "unused", "tenant": "acme"})
