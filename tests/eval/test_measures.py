"""Fidelity, rows, FLOPs and memory: figures that were worked out by hand, or known to be zero or not."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import build
from tiny_hub import SYSTEM, TOPICS

from blendkv.blend import SELECTORS, BlendReport, BlendSettings, parse_mode
from blendkv.engines.base import GenerationOptions
from blendkv.engines.torch.engine import TorchEngine
from blendkv.engines.torch.runner import TorchRunner
from blendkv.errors import InputError
from blendkv.eval import environment as environment_module
from blendkv.eval.bench.flops import FlopModel
from blendkv.eval.bench.memory import peak_extra_bytes
from blendkv.eval.environment import environment
from blendkv.eval.fidelity import Fidelity, Reference, blended, compare, noise_floor, reference
from blendkv.eval.rows import ModeSamples, percentiles_ms
from blendkv.library import ChunkLibrary
from blendkv.prompt import PromptBuilder
from blendkv.retrieval.split import tokenise
from blendkv.store.tiered import KVStore


@pytest.fixture(scope="module")
def builder(llama):
    return PromptBuilder(llama.tokenizer, SYSTEM)


@pytest.fixture(scope="module")
def prompt(llama, builder):
    chunks = [tokenise(llama.tokenizer, TOPICS[name], name)[0] for name in ("scope", "lambda", "with")]
    return builder.first(chunks, "What does nonlocal do?")


@pytest.fixture(scope="module")
def library(llama, builder):
    with KVStore.open(None, memory_bytes=1 << 30) as store:
        yield ChunkLibrary(llama, store, "system", builder.prefix)


@pytest.fixture(scope="module")
def truth(llama, prompt):
    return reference(llama, prompt)


def test_the_reference_is_the_greedy_answer(llama, prompt, truth):
    decoder = llama.decoder(prompt.token_ids, None, GenerationOptions(max_new_tokens=len(truth.tokens)))
    list(decoder)
    assert truth.tokens.tolist()[: len(decoder.tokens)] == decoder.tokens
    assert truth.log_probs.shape == (16, len(llama.tokenizer))
    assert torch.allclose(truth.log_probs.exp().sum(-1), torch.ones(16), atol=1e-4)


def test_full_prefill_against_itself(llama, prompt, truth):
    found = noise_floor(llama, prompt, truth)
    assert abs(found.kl) < 1e-6
    assert found.top1 == 1.0


def test_another_model_is_far(llama, other_folder, prompt, truth):
    found = noise_floor(TorchEngine.load(str(other_folder)), prompt, truth)
    assert found.kl > 0.1
    assert found.top1 < 1.0


@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_a_blend_is_scored_by_teacher_forcing(llama, library, prompt, tokens):
    """Budget 1 is full prefill in every step, though the steps are run at once; reuse is not."""
    truth = reference(llama, prompt, tokens)
    close, report = blended(llama, library, prompt, truth, BlendSettings("strided", 1.0))
    assert abs(close.kl) < 1e-5
    assert close.top1 == 1.0
    assert 0 < report.budget_spent <= 1
    far, _ = blended(llama, library, prompt, truth, BlendSettings("strided", 0.0, "off"))
    assert far.kl > 100 * abs(close.kl) + 1e-4


def test_compare_by_hand():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    found = compare(Reference(torch.tensor([0, 0]), p.log()), q.log())
    assert found.kl == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2, abs=1e-6)
    assert found.top1 == 0.5


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=30))
def test_percentiles(seconds):
    found = percentiles_ms(seconds)
    assert found["p20"] <= found["p50"] <= found["p80"]
    assert found["p50"] == pytest.approx(float(np.median(seconds)) * 1e3, rel=1e-6, abs=1e-3)


def report(**values):
    fields = {
        "selector": "strided", "shift": "js", "budget_asked": 0.5, "budget_spent": 0.25, "total_tokens": 10,
        "reusable_tokens": 6, "exact_tokens": 0, "fresh_tokens": 2, "recomputed_tokens": 3, "scored_rows": 0,
        "bytes_loaded": 7,
        "selected": torch.tensor([3, 5, 6]), "stages": {},
    }  # fmt: skip
    return BlendReport(**{**fields, **values})


def test_rows():
    full = ModeSamples(parse_mode("full"), [1.0, 2.0, 3.0], [Fidelity(0.0, 1.0)])
    ours = ModeSamples(parse_mode("blend:strided@0.5"), [0.5], [Fidelity(0.1, 1.0), Fidelity(0.3, 0.5)])
    ours.reports += [report(), report(budget_spent=0.35)]
    ours.bytes_loaded = 14
    row = ours.row(full)
    assert row["speedup_p50"] == 4.0
    assert row["ttft_ms"] == {"p20": 500.0, "p50": 500.0, "p80": 500.0}
    assert (row["selector"], row["budget_asked"], row["n"], row["bytes_loaded"]) == ("strided", 0.5, 2, 14)
    assert row["budget_spent"] == pytest.approx(0.3)
    assert row["kl"] == pytest.approx(0.2)
    assert row["kl_se"] == pytest.approx(0.1)  # standard deviation .1414 over the root of 2
    assert row["top1"] == pytest.approx(0.75)
    assert full.row(full)["speedup_p50"] == 1.0
    assert full.row(full)["kl_se"] is None


def test_what_was_not_measured_is_null():
    row = ModeSamples(parse_mode("reuse")).row(None)
    empty = {"selector", "budget_spent", "f1", "em", "rouge_l", "kl", "kl_se", "top1", "ttft_ms", "speedup_p50"}
    assert {name for name, value in row.items() if value is None} == empty
    assert (row["mode"], row["budget_asked"], row["n"], row["bytes_loaded"]) == ("reuse", 0.0, 0, 0)
    assert json.loads(json.dumps(row)) == row


budgets = st.integers(0, 10_000).map(lambda n: n / 10_000)


@given(st.sampled_from(SELECTORS.names()), budgets, st.sampled_from(["", "+shift", "-shift"]))
def test_modes_survive_being_written(selector, budget, suffix):
    mode = parse_mode(f"blend:{selector}@{budget}{suffix}")
    again = parse_mode(str(mode))
    assert again.settings.asked == mode.settings.asked == budget
    assert again.settings.selector == selector
    assert again.settings.shift_kind == mode.settings.shift_kind
    assert str(again) == str(mode)


@pytest.mark.parametrize("spec", ["", "Full", "blend:strided@", "blend:strided@x", "mix:strided@0.1", "reuse@1"])
def test_modes_that_are_none(spec):
    with pytest.raises(InputError, match="unknown mode"):
        parse_mode(spec)


def test_the_shortest_blend():
    assert str(parse_mode("blend:")) == "blend:head_query@0.05"


@pytest.fixture(scope="module")
def model():
    return FlopModel.counted(TorchRunner(build("llama")))


class TestFlops:
    """A Llama of 4 layers, width 48, 4 heads and 2 KV heads of 16, MLP of 40."""

    LINEAR = 4 * 2 * (48 * 64 + 2 * 48 * 32 + 64 * 48 + 3 * 48 * 40)
    PER_KEY = 2 * 4 * (16 + 16)  # of one query and one layer: q k^T and the sum over v

    def test_full(self, model):
        assert model.per_row == pytest.approx(self.LINEAR, rel=1e-3)
        assert model.full(10) == pytest.approx(10 * self.LINEAR + 4 * self.PER_KEY * 55, rel=1e-3)

    def test_blend(self, model):
        """Rows 3, 5, 6 and the question at 8, 9: they see 4, 6, 7, 9 and 10 keys."""
        plain = 5 * self.LINEAR + 4 * self.PER_KEY * (4 + 6 + 7 + 9 + 10)
        spent = 3 / 6
        assert model.blend(report(budget_spent=spent)) == pytest.approx(plain, rel=1e-3)
        scored = plain + 2 * self.LINEAR + 4 * self.PER_KEY * 19
        assert model.blend(report(budget_spent=spent, scored_rows=2)) == pytest.approx(scored, rel=1e-3)
        # Six candidates in two layers, three of them in the other two: (2 * 6 + 2 * 3) / (4 * 6).
        early = plain + (2 * 6 - 2 * 3) * self.LINEAR / 4
        assert model.blend(report(budget_spent=18 / 24)) == pytest.approx(early, rel=1e-3)

    def test_windows(self):
        model = FlopModel.counted(TorchRunner(build("mistral")))  # every layer sees 9 tokens
        assert model.attention(torch.arange(20)) == 4 * self.PER_KEY * (45 + 11 * 9)
        assert model.attention(torch.arange(20), 1) == self.PER_KEY * (45 + 11 * 9)


def test_peak_extra_bytes():
    before = torch.zeros(5 << 20, dtype=torch.uint8)

    def call():
        a = torch.zeros(1 << 20, dtype=torch.uint8)
        b = torch.zeros(2 << 20, dtype=torch.uint8)
        del a
        c = torch.zeros(1 << 19, dtype=torch.uint8)
        return b, c, before

    assert peak_extra_bytes(call) == pytest.approx(3 << 20, abs=4096)
    assert peak_extra_bytes(lambda: None) == 0


def test_environment(monkeypatch):
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert found["cores"] >= 1
    assert found["torch"] == torch.__version__
    assert found["cpu"]

    def fail(*args, **kwargs):
        raise OSError

    monkeypatch.setattr(environment_module, "open", fail, raising=False)
    assert environment()["cpu"]
