"""The search for the smallest codec within noise of raw, on made-up figures and on tiny models."""

from __future__ import annotations

import random
import statistics
from types import SimpleNamespace

import pytest
from tiny import seed_of_run
from tiny_hub import TOPICS, save_model

from blendkv.blend import BlendSummary
from blendkv.blend.gate import DEFAULT_MODE, Target
from blendkv.engines.torch.engine import TorchEngine
from blendkv.errors import InputError
from blendkv.eval import calibrate as calibrating
from blendkv.eval import codec_choice as module
from blendkv.eval.codec_choice import LADDER, MARGIN, choose_codec, codec_sizes
from blendkv.eval.items import EvalItem
from blendkv.eval.subject import Asked, Comparison, Truth
from blendkv.eval.subject_torch import TorchSubject
from blendkv.store import KVStore

MODE = "blend:strided@0.3"
SIZES = {"int8": 0.5, "turbo4": 0.28, "turbo3": 0.2, "turbo2": 0.16}


class MadeUp:
    """Chunk KVs of one codec: KL is raw's of that item plus an excess around a mean, the same whenever asked."""

    engine_name, model, fingerprint, dtype = "torch", "made-up", "f00", "float32"

    def __init__(self, codec, excess, seed):
        self.codec, self._excess, self._seed = codec, excess, seed
        self.compared: list[str] = []

    def prepare(self, built):
        pass

    def truth(self, built):
        return Truth((1,), "blue", built.record.item)

    def budget_one(self, built, truth):
        return 0.0

    def compare(self, built, mode, truth):
        assert truth.state == built.record.item
        if mode.spec == "full":
            return Comparison(0.001, 0.0, None, 1.0)
        if built.chunks == 1:
            return Comparison(0.0, 0.0, None, 1.0)
        if isinstance(self._excess, Exception):
            raise self._excess
        self.compared.append(built.record.item)
        base = random.Random(f"{self._seed} {built.record.item}").uniform(0.018, 0.022)
        extra = self._excess * random.Random(f"{self._seed} {self.codec} {built.record.item}").uniform(0.5, 1.5)
        report = BlendSummary("x", "off", 0.1, 0.1, 1100, 1000, 0, 100, 50, 0, 0, {})
        return Comparison(base + extra, 0.0, 0.0, 1.0, report)

    def ask(self, built, mode, max_new_tokens):
        return Asked((1,), "blue", 1.0, {})


@pytest.fixture
def made_up(monkeypatch):
    def build(subject, item, chunks):
        record = SimpleNamespace(item=item.id, task=item.task, answers=list(item.answers))
        return SimpleNamespace(record=record, max_new_tokens=8, chunks=chunks)

    monkeypatch.setattr(calibrating, "build", build)
    monkeypatch.setattr(module, "build", build)

    def run(excess, sizes=SIZES, items=24, **more):
        seed = seed_of_run()
        print(f"seed {seed}")
        subjects = {"raw": MadeUp("raw", 0.0, seed), **{c: MadeUp(c, excess.get(c, 1.0), seed) for c in sizes}}
        given = [EvalItem(f"i{n}", "Which?", ("blue",), ("a",)) for n in range(items)]
        more = {"candidates": [MODE], "target": Target(0.05, 0.01), **more}
        choice, verdicts = choose_codec(subjects.__getitem__, sizes, given, seed=seed, **more)
        return choice, {v.codec: v for v in verdicts}, subjects

    return run


def test_the_smallest_within_noise_is_taken(made_up):
    choice, verdicts, subjects = made_up({"int8": 0.0005, "turbo4": 0.002, "turbo3": 0.02, "turbo2": 0.5})
    assert (choice.codec, choice.mode, choice.margin) == ("turbo4", MODE, MARGIN)
    rows = {r.codec: r for r in choice.rows}
    assert list(rows) == list(SIZES)
    assert [r.passed for r in choice.rows] == [True, True, False, False]
    assert 0.001 < rows["turbo4"].excess < rows["turbo4"].excess_upper < 0.003
    assert rows["turbo3"].note.startswith("its excess is at least 0.0")
    assert rows["turbo2"].note == "it comes behind turbo3, which failed"
    assert (rows["turbo4"].n, rows["turbo3"].n, rows["turbo2"].n) == (24, 8, 8), "what has no hope is given up"
    assert verdicts.keys() == {"raw", "int8", "turbo4"}
    assert all(v.passed for v in verdicts.values())
    assert choice.rounding == 0.001
    assert choice.summary.startswith("codec turbo4: 0.280 of the bytes, KL +0.00")
    assert set(subjects["turbo2"].compared) == set(subjects["turbo3"].compared)


def test_a_codec_behind_one_that_failed_is_not_taken(made_up):
    choice, verdicts, _ = made_up({"int8": 0.02, "turbo4": 0.0, "turbo3": 0.0, "turbo2": 0.0})
    assert choice.codec == "raw"
    assert verdicts.keys() == {"raw"}
    assert [r.note for r in choice.rows[1:]] == ["it comes behind int8, which failed"] * 3
    assert choice.summary.startswith("codec raw; int8: its excess is at least")


def test_what_is_not_shown_is_not_taken(made_up, monkeypatch):
    """A mean within the margin whose bound is not."""
    monkeypatch.setattr(module, "upper_bound", lambda values, level, seed: statistics.fmean(values) + MARGIN)
    choice, _, _ = made_up({"int8": 0.001}, sizes={"int8": 0.5})
    assert choice.codec == "raw"
    assert choice.rows[0].excess < MARGIN
    assert choice.rows[0].note.startswith("its excess may be as high as 0.00")


def test_a_model_that_the_gate_does_not_pass_stays_raw(made_up):
    choice, verdicts, _ = made_up(dict.fromkeys(SIZES, 0.0), target=Target(0.001))
    assert (choice.codec, choice.mode) == ("raw", DEFAULT_MODE)
    assert not verdicts["raw"].passed
    assert {r.note for r in choice.rows} == {"the gate passes no mode of this model"}
    assert not any(r.passed for r in choice.rows)
    assert all(r.excess == 0.0 for r in choice.rows), "measured all the same"


def test_a_codec_that_the_gate_does_not_pass_is_not_taken(made_up):
    """Raw has a KL of .02 and passes at .0215; .004 more is within noise, and too much for the gate."""
    choice, verdicts, _ = made_up(
        {"int8": 0.0, "turbo4": 0.004, "turbo3": 0.0}, sizes={"int8": 0.5, "turbo4": 0.28, "turbo3": 0.2}, items=200,
        target=Target(0.0215),
    )  # fmt: skip
    assert choice.codec == "int8"
    assert [r.passed for r in choice.rows] == [True, False, False]
    assert choice.rows[1].note.startswith("the gate did not pass: ")
    assert choice.rows[2].note == "it comes behind turbo4, which failed"
    assert not verdicts["turbo4"].passed
    assert verdicts["int8"].passed


def test_a_codec_that_cannot_be_measured(made_up):
    choice, _, _ = made_up({"int8": InputError("no room"), "turbo4": 0.0})
    assert choice.codec == "raw"
    assert choice.rows[0].note == "no room"
    assert (choice.rows[0].n, choice.rows[0].kl, choice.rows[0].excess_upper) == (0, None, None)


def test_no_codec_fits(made_up):
    choice, _, _ = made_up({}, sizes={})
    assert choice.codec == "raw"
    assert choice.summary == "codec raw, the only codec that this model's heads fit"


def items(count=12):
    plain = [text * 2 for text in TOPICS.values() if text.isascii()]
    return [
        EvalItem(str(n), f"What of {n}?", ("A",), (plain[n % 4], plain[(n + 1) % 4]), max_new_tokens=2)
        for n in range(count)
    ]


def test_tiny_models_tell_codecs_apart(llama):
    """Random weights, whose KL to full prefill is large: 8 bits are noise there, and 2 bits are not."""
    assert list(codec_sizes(llama.runner)) == list(LADDER)
    sizes = codec_sizes(llama.runner)
    assert sizes["int8"] > sizes["turbo4"] > sizes["turbo3"] > sizes["turbo2"] > 0.07
    subject = TorchSubject(llama, KVStore.open(None, memory_bytes=1 << 28))
    choice, verdicts = choose_codec(
        subject.stored_as, sizes, items(), target=Target(100, 1.0), candidates=["blend:strided@0.6"], chunks=2
    )
    subject.close()
    print(choice)
    rows = {r.codec: r for r in choice.rows}
    assert (rows["turbo2"].passed, choice.codec != "turbo2") == (False, True)
    assert abs(rows["int8"].excess) < abs(rows["turbo2"].excess)
    assert choice.codec in {v.codec for v in verdicts}
    assert choice.rounding < 1e-4


def test_heads_that_turbo_cannot_take(tmp_path):
    narrow = TorchEngine.load(str(save_model(tmp_path / "narrow", head_dim=12)))
    assert list(codec_sizes(narrow.runner)) == ["int8"]
