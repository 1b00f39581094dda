"""The gate's search: what it measures, what it drops, and what it says."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import seed_of_run

from blendkv.blend import BlendSummary, parse_mode
from blendkv.errors import InputError
from blendkv.eval import calibrate as module
from blendkv.eval import judging
from blendkv.eval.calibrate import GRID, LEAST_ITEMS, calibrate
from blendkv.eval.items import EvalItem
from blendkv.eval.subject import Asked, Comparison, Truth

ANSWER = "blue whale"


@dataclass
class Rule:
    """How a made-up mode behaves: mean KL, share of items answered wrongly, budget, scoring rows.

    ``later`` is the KL after the 10 items of a screening.
    """

    kl: float
    wrong: float = 0.0
    budget: float = 0.05
    scored: int = 0
    spread: float = 0.1
    error: Exception | None = None
    fallback: str | None = None
    later: float | None = None


@dataclass
class MadeUp:
    """A subject whose figures are drawn around what its rules say."""

    rules: dict[str, Rule]
    red: float = 0.0
    alone: float = 0.0
    engine_name: str = "torch"
    model: str = "made-up"
    fingerprint: str = "f00"
    dtype: str = "float32"
    codec: str = "raw"
    rng: random.Random = field(default_factory=random.Random)
    compared: dict[str, list[str]] = field(default_factory=dict)
    asked: dict[str, list[str]] = field(default_factory=dict)

    def prepare(self, built: Any) -> None:
        pass

    def truth(self, built: Any) -> Truth:
        return Truth((1,), ANSWER)

    def budget_one(self, built: Any, truth: Truth) -> float:
        return self.red

    def compare(self, built: Any, mode: Any, truth: Truth) -> Comparison:
        if built.chunks == 1:
            return Comparison(self.alone, 0.0, None, 1.0)
        rule = self.rules[mode.spec]
        self.compared.setdefault(mode.spec, []).append(built.record.item)
        if rule.error is not None:
            raise rule.error
        late = rule.later is not None and len(self.compared[mode.spec]) > 10
        kl = (rule.later if late else rule.kl) * self.rng.uniform(1 - rule.spread, 1 + rule.spread)
        report = BlendSummary("x", "off", rule.budget, rule.budget, 1100, 1000, 0, 100, 50, rule.scored, 0, {})
        return Comparison(kl, kl, kl, 1.0, report)

    def ask(self, built: Any, mode: Any, max_new_tokens: int) -> Asked:
        self.asked.setdefault(mode.spec, []).append(built.record.item)
        if mode.spec == "full":
            return Asked((1,), ANSWER, 1.0, {})
        rule = self.rules[mode.spec]
        text = "red ant" if self.rng.random() < rule.wrong else ANSWER
        return Asked((1,), text, 0.25, {}, fallback=rule.fallback)


@pytest.fixture
def made_up(monkeypatch):
    """Calibrate over made-up modes; prompts are not needed then."""

    def build(subject, item, chunks):
        record = SimpleNamespace(item=item.id, task=item.task, answers=list(item.answers))
        return SimpleNamespace(record=record, max_new_tokens=8, chunks=chunks)

    monkeypatch.setattr(module, "build", build)

    def run(rules, items=40, red=0.0, alone=0.0):
        seed = seed_of_run()
        print(f"seed {seed}")
        subject = MadeUp(rules, red, alone, rng=random.Random(seed))
        given = [EvalItem(f"i{n}", "Which?", (ANSWER,), ("a",)) for n in range(items)]
        return calibrate(subject, given, candidates=list(rules), seed=seed), subject

    return run


CLOSE = {
    "blend:strided@0.02": Rule(0.2, budget=0.02),
    "blend:strided@0.05": Rule(0.02, budget=0.05),
    "blend:head_query@0.2": Rule(0.01, budget=0.2, scored=100),
    "blend:kv_deviation@0.15": Rule(0.03, budget=0.15),
}


def test_the_cheapest_that_is_close_enough(made_up):
    verdict, subject = made_up(CLOSE)
    assert verdict.passed
    assert verdict.mode == "blend:strided@0.05"
    assert verdict.modes == ("blend:strided@0.05", "blend:kv_deviation@0.15", "blend:head_query@0.2"), "by cost"
    rows = {row.mode: row for row in verdict.evidence}
    assert rows.keys() == CLOSE.keys()
    assert (rows["blend:strided@0.02"].stage, rows["blend:strided@0.02"].n) == ("screen", 10)
    assert "KL is at least" in rows["blend:strided@0.02"].note
    best = rows["blend:strided@0.05"]
    assert (best.stage, best.n, best.passed, best.note) == ("confirm", 30, True, "")
    assert best.kl <= best.kl_upper <= 0.05
    assert best.f1_difference == best.f1_lower == 0.0
    assert best.cost == pytest.approx((100 + 0.05 * 1000) / 1100)
    assert rows["blend:head_query@0.2"].cost == pytest.approx((100 + 100 + 200) / 1100)
    assert best.ttft_ratio == 0.25
    # Screening and confirming share no item, and what was dropped is not run again.
    screening = set(subject.compared["blend:strided@0.02"])
    assert len(screening) == 10
    assert not screening & set(subject.asked["full"])
    assert len(set(subject.compared["blend:strided@0.05"])) == 40
    assert "blend:strided@0.02" not in subject.asked
    assert verdict.summary.startswith("blend:strided@0.05: KL 0.0")
    assert "allowed 0.05), F1 +0.000 (at least +0.000, allowed -0.01), with 0.9833 confidence" in verdict.summary
    assert verdict.data["f1_full"] == 1.0


def test_quality_that_is_bad_and_samples_that_are_small(made_up):
    bad, _ = made_up({"blend:strided@0.05": Rule(0.9), "reuse": Rule(2.0)})
    assert (bad.passed, bad.mode, bad.modes) == (False, None, ())
    assert bad.summary.startswith("quality: the closest mode, blend:strided@0.05 has KL 0.")
    wrong, _ = made_up({"blend:strided@0.05": Rule(0.01, wrong=0.9)})
    assert wrong.summary.startswith("quality: ")
    assert "F1 -" in wrong.summary
    assert not wrong.passed


def test_a_sample_that_is_too_small_is_not_called_bad(made_up, monkeypatch):
    monkeypatch.setattr(judging, "upper_bound", lambda values, level, seed: statistics.fmean(values) + 1)
    verdict, _ = made_up({"blend:strided@0.05": Rule(0.01)})
    assert not verdict.passed
    assert verdict.summary.startswith("not shown: blend:strided@0.05 has KL 0.0")
    assert "its KL may be as high as 1.0" in verdict.summary
    assert "at 0.95 confidence: give more items" in verdict.summary


def test_the_first_budget_that_fails_ends_its_rule(made_up):
    """A smaller budget that looks fine does not pass behind a larger one that did not; another rule does."""
    verdict, _ = made_up(
        {
            "blend:strided@0.03": Rule(0.03, budget=0.03),
            "blend:strided@0.1": Rule(0.01, wrong=0.9, budget=0.1),
            "blend:head_query@0.1": Rule(0.01, budget=0.1),
            "blend:strided@0.02-shift": Rule(0.01, budget=0.02),
        }
    )
    assert verdict.modes == ("blend:strided@0.02-shift", "blend:head_query@0.1")
    rows = {row.mode: row for row in verdict.evidence}
    assert "its F1 may be lower by" in rows["blend:strided@0.1"].note
    assert rows["blend:strided@0.03"].note == "it comes behind blend:strided@0.1, which failed"
    assert verdict.data["confidence_per_rule"] == pytest.approx(1 - 0.05 / 3)


def test_what_has_no_hope_is_given_up_early(made_up):
    verdict, subject = made_up(
        {
            "blend:strided@0.1": Rule(0.01, later=0.5, budget=0.1),
            "blend:strided@0.05": Rule(0.01),
            "blend:head_query@0.1": Rule(0.01, budget=0.1),
        }
    )
    rows = {row.mode: row for row in verdict.evidence}
    assert verdict.modes == ("blend:head_query@0.1",)
    assert [rows[m].n for m in ("blend:strided@0.1", "blend:strided@0.05", "blend:head_query@0.1")] == [8, 8, 30]
    assert "its KL is at least 0." in rows["blend:strided@0.1"].note
    assert "comes behind blend:strided@0.1" in rows["blend:strided@0.05"].note
    alone, subject = made_up({"blend:strided@0.1": Rule(0.01, later=0.5)})
    assert not alone.passed
    assert len(subject.asked["full"]) == 8, "nothing is left to measure"


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (Rule(0.01, error=InputError("budget 0.01 is below the floor")), "budget 0.01 is below the floor"),
        (Rule(math.nan), "its KL on i"),
        (Rule(0.01, fallback="gate"), "was prefilled in full: gate"),
    ],
)
def test_modes_that_do_not_run_are_left_out(made_up, broken, why):
    fine = {"blend:strided@0.03": Rule(0.005, budget=0.03)}
    verdict, _ = made_up({**fine, "blend:strided@0.02": replace(broken, budget=0.02)})
    assert verdict.mode == "blend:strided@0.03"
    assert why in verdict.data["left_out"]["blend:strided@0.02"]
    alone, _ = made_up({"blend:strided@0.02": broken})
    assert not alone.passed
    assert "no mode could be measured" in alone.summary
    assert why in alone.summary


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({"red": 0.4}, "with every token recomputed, KL to full prefill is 0.4"),
        ({"red": math.nan}, "with every token recomputed, KL to full prefill is nan"),
        ({"alone": 0.2}, "one chunk behind the prefix that it was computed behind has KL 0.2"),
    ],
)
def test_blending_that_is_broken_as_such(made_up, figures, why):
    verdict, subject = made_up({"blend:strided@0.05": Rule(0.0)}, **figures)
    assert not verdict.passed
    assert why in verdict.summary
    assert subject.compared == {}


@pytest.mark.parametrize(
    ("items", "modes", "why"),
    [
        (LEAST_ITEMS - 1, ["reuse"], "7 items are too few"),
        (20, [], "no mode is given"),
        (20, ["full"], "full cannot be calibrated"),
        (20, ["prefix"], "prefix cannot be calibrated"),
        (20, ["epic@8"], "epic@8 cannot be calibrated"),
        (20, ["bogus"], "unknown mode 'bogus'"),
    ],
)
def test_what_is_refused(items, modes, why):
    given = [EvalItem(f"i{n}", "Which?", (ANSWER,), ("a",)) for n in range(items)]
    with pytest.raises(InputError, match=why):
        calibrate(MadeUp({}), given, candidates=modes)


def test_the_grid_is_understood():
    assert len({str(parse_mode(spec)) for spec in GRID}) == len(GRID) == 21
