"""Two tensor-parallel ranks: the answers of one, the same tokens chosen on both, no fault that leaves one waiting."""

from __future__ import annotations

import faulthandler
import random
import sys
from collections import Counter
from pathlib import Path

import cloudpickle
import pytest
from blending import Blending, close, transfer
from tiny import build, seed_of_run
from worlds import World

from blendkv.blend import blend, parse_mode
from blendkv.engines.fingerprint import fingerprint_folder
from blendkv.engines.torch.runner import TorchRunner
from blendkv.store.tiered import KVStore
from blendkv.types import Prompt, Recipe, Segment, chunk_key

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import a test
pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]
MODES = ["reuse", "blend:strided@0.3", "blend:head_query@0.4", "blend:query_attention@0.4", "blend:kv_deviation@0.7"]
HANG = 240
"""Seconds after which a test is taken to hang: the process ends, and its workers with it."""


class Parallel(Blending):
    """A vLLM whose two workers are processes of their own: they are reached by `each`."""

    def __init__(self, llm, runner, world, folder):
        self.llm, self.runner, self.world, self.folder = llm, runner, world, folder
        self.last = []

    def each(self, what, *args):
        """What ``what(worker, *args)`` returns on every rank."""
        return self.llm.collective_rpc(what, timeout=HANG / 2, args=args)

    @property
    def store_folder(self) -> Path:
        return self.folder / "store"

    def outcomes(self):
        """The connector's counters on every rank."""

        def read(worker):
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            return dict(get_kv_transfer_group().outcomes)

        return [Counter(found) for found in self.each(read)]

    def watch(self):
        """Have every rank note the tokens that its blends choose."""

        def note(worker):
            import blendkv.engines.vllm.worker as place

            inner = getattr(place.blend, "inner", place.blend)

            def noting(*args, **kwargs):
                report = inner(*args, **kwargs)
                noting.chosen.append(report.selected.tolist())
                return report

            noting.inner, noting.chosen = inner, []
            place.blend = noting

        self.each(note)

    def chosen(self):
        """What every rank has chosen since `watch`."""

        def read(worker):
            import blendkv.engines.vllm.worker as place

            return place.blend.chosen

        return self.each(read)

    def expected_choice(self, settings):
        """The tokens that one runner with all heads chooses."""
        segments = self.world.prompt.segments
        cut = Prompt((*segments[:-1], Segment("query", segments[-1].token_ids[:-1])))
        return blend(self.runner, cut, self.world.source(), self.world.sink(), settings).selected.tolist()

    def keys(self):
        """Keys of the system prefix and of the chunks."""
        fingerprint = fingerprint_folder(self.folder)
        system = self.world.prompt.segments[0].token_ids
        recipe = Recipe("system", tuple(int(t) for t in system), "float32")
        chunks = [chunk_key(fingerprint, recipe, chunk.token_ids) for chunk in self.world.chunks]
        return [chunk_key(fingerprint, Recipe("system", (), "float32"), system), *chunks]


@pytest.fixture(scope="module", params=[2, 1], ids=["a head each", "one head on both"])
def parallel(request, tmp_path_factory):
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    seed = seed_of_run()
    print(f"seed {seed}")
    folder = tmp_path_factory.mktemp("model")
    model = build("llama", head_dim=32, hidden_size=128, num_key_value_heads=request.param)
    model.save_pretrained(folder)
    runner = TorchRunner(model)
    world = World.make(runner, random.Random(seed), sizes=(5, 40, 33))
    while len(world.prompt.segments[-1].token_ids) < 2:
        world = World.make(runner, random.Random(seed := seed + 1), sizes=(5, 40, 33))
    with pytest.MonkeyPatch.context() as env:
        env.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # or vLLM wants a NUMA node for each worker
        env.setenv("OMP_NUM_THREADS", "1")
        llm = LLM(
            model=str(folder), dtype="float32", enforce_eager=True, max_model_len=512, skip_tokenizer_init=True,
            tensor_parallel_size=2, distributed_executor_backend="mp", enable_prefix_caching=True,
            kv_transfer_config=transfer(folder),
        )  # fmt: skip
    try:
        yield Parallel(llm, runner, world, folder)
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


@pytest.fixture(autouse=True)
def no_hang():
    faulthandler.dump_traceback_later(HANG, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def test_budget_one_is_plain_vllm(parallel):
    plain = parallel.ask()
    assert close(parallel.ask(mode="blend:head_query@1", salt="exact-1"), plain)
    assert parallel.told["outcome"] == "blended"


@pytest.mark.parametrize("mode", MODES)
def test_below_it_is_the_blend_of_one_rank(parallel, mode):
    settings = parse_mode(mode).settings
    parallel.watch()
    tokens, log_probs = parallel.ask(mode=mode, salt=mode)
    assert parallel.told["outcome"] == "blended"
    first, second = parallel.chosen()
    assert first == second
    assert len(first) == 1
    swapped = set(first[0]) ^ set(parallel.expected_choice(settings))
    assert len(swapped) <= (0 if settings.rule.needs == "nothing" else 2)  # equal but for rounding
    if not swapped:
        token, log_prob = parallel.embedded(settings)
        assert tokens[0] == token
        assert abs(log_probs[0] - log_prob) < 1e-3


def test_chunks_are_stored_with_all_heads(parallel):
    """What two ranks computed is what one runner with all heads computes."""
    parallel.ask(mode="reuse", salt="fill")
    expected = [parallel.world.system, *parallel.world.chunks]

    def flush(worker):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().blender().store.flush()

    parallel.each(flush)
    with KVStore.open(parallel.store_folder, memory_bytes=1 << 20) as store:
        assert sorted(row.key for row in store.ls()) == sorted(parallel.keys())
        for key, kv in zip(parallel.keys(), expected, strict=True):
            reader = store.get(key, kv.token_ids)
            for layer in range(kv.layers):
                for stored, own in zip(reader.layer(layer), kv.layer(layer), strict=True):
                    assert stored.shape == own.shape
                    assert (stored - own).abs().max() < 1e-4 * max(1.0, float(own.abs().max()))


def test_a_missing_chunk_is_computed_by_both(parallel):
    before = parallel.ask(mode="reuse", salt="m1")
    system, key = parallel.world.prompt.segments[0].token_ids.tolist(), parallel.keys()[2]

    def forget(worker, key):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        store = get_kv_transfer_group().blender().store
        store.flush()
        store.remove(key)

    def computed(worker, system):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from blendkv.types import as_token_ids

        return get_kv_transfer_group().blender().library("system", as_token_ids(system)).counts.computed

    parallel.each(forget, key)
    counted = parallel.each(computed, system)
    assert close(parallel.ask(mode="reuse", salt="m2"), before)
    assert parallel.told["outcome"] == "blended"
    assert parallel.each(computed, system) == [n + 1 for n in counted]


def test_what_is_worth_storing_is_decided_once(parallel):
    """The ranks' stores would say different things: one would wait for the other's heads for ever."""
    key = parallel.keys()[1]
    segments = [(segment.kind, segment.token_ids.tolist()) for segment in parallel.world.prompt.segments]

    def read(worker, segments, key, earns):
        from vllm.distributed import get_tensor_model_parallel_rank
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from blendkv.types import Prompt, Segment, as_token_ids

        prompt = Prompt(tuple(Segment(kind, as_token_ids(ids)) for kind, ids in segments))
        blender, rank = get_kv_transfer_group().blender(), get_tensor_model_parallel_rank()
        blender.store.flush()
        blender.store.remove(key)
        blender.store.earns = lambda *asked: earns[rank]
        library = blender.library("system", prompt.segments[0].token_ids)
        before = library.counts.not_worth_storing
        found = library.readers(prompt)
        blender.store.flush()
        del blender.store.earns
        stored = blender.store.token_ids(key) is not None
        return sum(reader is not None for reader in found), library.counts.not_worth_storing - before, stored

    pieces = sum(kind in ("system", "chunk") for kind, _ in segments)
    first, second = parallel.each(read, segments, key, [False, True])
    assert first[0] == second[0] == pieces
    assert first[1] >= 1, "rank 0 is asked"
    assert second[1] == 0, "and nobody else"
    assert not first[2]
    first, second = parallel.each(read, segments, key, [True, False])
    assert first[:2] == second[:2] == (pieces, 0)
    assert first[2]


def break_store(worker, which, kind):
    """On one rank, no chunk can be looked up, or none can be read."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from blendkv.errors import DamagedChunkError, StoreError

    store = get_kv_transfer_group().blender().store
    if worker.rank != which:
        return
    inner = store.get

    class Damaged:
        def __init__(self, reader):
            self.layers = reader.layers

        def layer(self, index):
            raise DamagedChunkError("0" * 64, "a test")

    def failing(key, token_ids):
        if kind == "look-up":
            raise StoreError("the disk of this rank is away")
        reader = inner(key, token_ids)
        return None if reader is None else Damaged(reader)

    store.get = failing


def mend_store(worker):
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group().blender().store.__dict__.pop("get", None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["look-up", "damage"])
def test_a_store_that_fails_on_one_rank(parallel, rank, fault):
    """Chunks that one rank cannot read are computed by both: the answer stays the blend's."""
    mode = "blend:head_query@0.4"
    before = parallel.ask(mode=mode, salt=f"before-{rank}-{fault}")
    parallel.each(break_store, rank, fault)
    try:
        during = parallel.ask(mode=mode, salt=f"during-{rank}-{fault}")
        assert parallel.told["outcome"] == "blended"
    finally:
        parallel.each(mend_store)
    assert close(during, before)
    assert close(parallel.ask(mode=mode, salt=f"after-{rank}-{fault}"), before)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["look-up", "damage"])
def test_chunks_found_by_content_that_one_rank_cannot_read(parallel, rank, fault):
    """Without boundaries there is nothing to compute again: both ranks give up, and blend the next request."""
    plain = parallel.ask()
    blended = parallel.ask(mode="reuse", segments=None, salt=f"before-{rank}-{fault}-content")
    assert parallel.told["outcome"] == "blended"
    assert not close(blended, plain)
    before = parallel.outcomes()
    parallel.each(break_store, rank, fault)
    try:
        during = parallel.ask(mode="reuse", segments=None, salt=f"during-{rank}-{fault}-content")
        assert parallel.told["outcome"] == "full"
    finally:
        parallel.each(mend_store)
    assert close(during, plain)
    for old, new in zip(before, parallel.outcomes(), strict=True):
        assert sum((new - old).values()) == 1
        assert new["blended"] == old["blended"]
    assert close(parallel.ask(mode="reuse", segments=None, salt=f"after-{rank}-{fault}-content"), blended)


def precompute(worker, chunks, full):
    """What a rank's library says to filling the store; with ``full`` rank 0 cannot write."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from blendkv.errors import StoreFullError
    from blendkv.types import as_token_ids

    def failing():
        raise StoreFullError("no space")

    blender = get_kv_transfer_group().blender()
    library = blender.library("bos", as_token_ids([]))
    before = library.counts.computed
    if full and worker.rank == 0:
        blender.store.flush = failing
    try:
        left_out = library.precompute([as_token_ids(chunk) for chunk in chunks], None)
    except Exception as error:
        return type(error).__name__
    finally:
        blender.store.__dict__.pop("flush", None)
    return left_out, library.counts.computed - before, library.bytes_per_token


def test_the_store_is_filled_by_both(parallel):
    chunks = [chunk.token_ids.tolist() for chunk in parallel.world.chunks]
    per_token = sum(spec.kv_bytes(4) for spec in parallel.runner.layers)
    assert parallel.each(precompute, chunks[:2], False) == [(0, 2, per_token)] * 2
    assert parallel.each(precompute, chunks[:2], False) == [(0, 0, per_token)] * 2
    assert parallel.each(precompute, chunks, True) == ["StoreFullError", "StoreError"]
    assert parallel.each(precompute, chunks, False) == [(0, 0, per_token)] * 2


def test_a_fault_in_the_middle_ends_the_engine(parallel):
    """One rank fails where the other waits for it in the model: that cannot be mended, and nothing must go on."""

    def break_blend(worker):
        from datetime import timedelta

        import blendkv.engines.vllm.parallel
        import blendkv.engines.vllm.worker as place

        def failing(*args):
            raise RuntimeError("this rank cannot")

        blendkv.engines.vllm.parallel.GRACE = timedelta(seconds=1)
        if worker.rank == 1:
            place.blend = failing

    parallel.each(break_blend)
    with pytest.raises(RuntimeError, match="cancelled"):  # as vLLM says when a worker is gone
        parallel.ask(mode="reuse", salt="apart")
