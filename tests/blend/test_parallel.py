"""Ranks that hold some heads each choose the tokens that one runner with all heads chooses."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import build, seed_of_run
from worlds import ListSource, World

from blendkv.blend import SELECTORS, BlendSettings, blend
from blendkv.engines.base import LayerSpec
from blendkv.engines.torch.cache import ContiguousCache
from blendkv.engines.torch.runner import TorchRunner
from blendkv.engines.vllm.parallel import HeadShare
from blendkv.kernels import AttentionParams

RANKS = 2


class Meeting:
    """Where threads stand in for ranks: each brings a tensor and gets all of them."""

    def __init__(self):
        self._barrier = threading.Barrier(RANKS, timeout=60)
        self._brought = [None] * RANKS

    def exchange(self, rank, tensor):
        self._brought[rank] = tensor
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()
        return found

    def leave(self):
        """A rank that failed lets nobody wait."""
        self._barrier.abort()


class RankRunner:
    """One rank over a whole model: its sessions see this rank's heads, the other ranks' outputs come by exchange.

    This is what tensor parallelism does, except that here each rank also computes the rest of the layer itself.
    """

    def __init__(self, whole, share, meeting):
        self._whole, self._share, self._meeting = whole, share, meeting
        group = [spec.q_heads // spec.kv_heads for spec in whole.layers]
        self.layers = tuple(self._local(spec, n) for spec, n in zip(whole.layers, group, strict=True))
        self.dtype, self.device, self.context = whole.dtype, whole.device, whole.context
        self.rotary = whole.rotary
        self.brought = []

    def _local(self, spec, group):
        count = self._share.local.stop - self._share.local.start
        queries = spec.q_heads // self._share.size
        assert count * group >= queries
        return LayerSpec(
            spec.index, queries, count, spec.head_dim, spec.v_head_dim, self._sinks(spec.params), spec.rotation
        )

    def _queries(self, heads):
        own = heads // self._share.size
        return slice(self._share.rank * own, (self._share.rank + 1) * own)

    def _sinks(self, params):
        if params.sinks is None:
            return params
        return AttentionParams(
            params.scale, params.window, params.softcap, params.sinks[self._queries(len(params.sinks))]
        )

    def forward(self, token_ids, positions, session, logits_to_keep=0):
        runner = self

        class Local:
            def attend(self, layer, q, k, v, params):
                mine = q[:, runner._queries(q.shape[1])]
                keys, values = k[:, runner._share.local], v[:, runner._share.local]
                out = session.attend(layer, mine, keys, values, runner._sinks(params))
                return torch.cat(runner._meeting.exchange(runner._share.rank, out), 1)

        return self._whole.forward(token_ids, positions, Local(), logits_to_keep)

    def reduce(self, tensor, statistic):
        self.brought.append(tensor)
        brought = torch.stack(self._meeting.exchange(self._share.rank, tensor.clone()))
        return brought.amax(0) if statistic == "max" else brought.mean(0)


def _leaves_a_choice(world):
    """Whether a budget of 0.7 of all chunks is less than the chunks behind the first, which is exact."""
    first, *others = (len(c.token_ids) for c in world.chunks)
    return sum(others) >= 20 and 0.8 * (first + sum(others)) < sum(others)


def local_source(source, share):
    return ListSource([None if r is None else share.take(r) for r in source.readers])


def on_ranks(world, models, settings):
    """The report, the final cache and the number of exchanged statistics of every rank."""
    meeting = Meeting()
    total = world.runner.layers[0].kv_heads

    def run(rank):
        share = HeadShare(total, rank, RANKS)
        runner = RankRunner(models[rank], share, meeting)
        sink = ContiguousCache(runner.layers, 4, torch.float32, torch.device("cpu"))
        try:
            return blend(runner, world.prompt, local_source(world.source(), share), sink, settings), sink, runner
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


CASES = {
    "llama-4": {"num_key_value_heads": 4},
    "llama-2": {"num_key_value_heads": 2},
    "llama-1": {"num_key_value_heads": 1},
    "gpt_oss-2": {"num_key_value_heads": 2, "sliding_window": 64},
}
"""By family and number of KV heads; with one KV head both ranks hold it. The window lets chunks see each other."""


@pytest.fixture(scope="module", params=CASES)
def case(request):
    seed = seed_of_run()
    print(f"seed {seed}")
    rng = random.Random(seed)
    models = [TorchRunner(build(request.param.split("-")[0], **CASES[request.param])) for _ in range(RANKS)]
    world = World.make(models[0], rng, chunks=3)
    while not _leaves_a_choice(world):
        world = World.make(models[0], rng, chunks=3)
    return world, models


@pytest.mark.parametrize("name", SELECTORS.names())
def test_every_rank_chooses_what_one_runner_with_all_heads_chooses(case, name):
    world, models = case
    settings = BlendSettings(name, 0.7)
    whole = world.sink()
    expected = blend(world.runner, world.prompt, world.source(), whole, settings)
    found = on_ranks(world, models, settings)
    needs = SELECTORS.get(name).needs
    chosen = [set(report.selected.tolist()) for report, _, _ in found]
    assert chosen[0] == chosen[1]
    swapped = chosen[0] ^ set(expected.selected.tolist())
    assert len(swapped) <= (0 if needs == "nothing" else 2)  # two scores that differ by rounding may change places
    for rank, (report, sink, runner) in enumerate(found):
        assert report.budget_spent == expected.budget_spent
        assert len(runner.brought) == (0 if needs == "nothing" else 1)
        if swapped:
            continue
        heads = HeadShare(world.runner.layers[0].kv_heads, rank, RANKS).local
        for layer in range(len(whole.layers)):
            for mine, all_heads in zip(
                sink.buffer(layer, whole.length), whole.buffer(layer, whole.length), strict=True
            ):
                assert (mine - all_heads[:, heads]).abs().max() < 1e-3
    if needs in ("max", "mean"):  # the control: without an exchange the ranks would see different scores
        first, second = (runner.brought[0] for _, _, runner in found)
        assert not torch.allclose(first, second, atol=1e-3)
