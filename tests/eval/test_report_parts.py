"""The parts of the report: passages cut around their recomputed tokens, words, names, and figures as text."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from eval_runs import NASTY, fake_run
from hypothesis import given
from hypothesis import strategies as st
from tiny import seed_of_run

from blendkv.eval.items import ItemRecord
from blendkv.eval.report import data, plots, words
from blendkv.eval.report.passages import NEAR, ROOM, lay_out
from blendkv.eval.report.text import DASH, clean, figure, listed, measured, milliseconds, percent
from blendkv.eval.summary import summarise

SEED = seed_of_run()
texts = st.text(max_size=6) | st.sampled_from(NASTY[:12])


def record(chunks):
    return ItemRecord("item", "qa", "?", ["!"], chunks, 0, True)


@st.composite
def marked_chunks(draw):
    chunks = draw(st.lists(st.lists(texts, max_size=80), max_size=4))
    chosen = [draw(st.lists(st.integers(-2, len(c) + 2), max_size=9)) for c in chunks]
    return chunks, chosen


@given(marked_chunks())
def test_no_token_is_lost_and_those_that_were_chosen_are_marked(drawn):
    chunks, chosen = drawn
    for passage, tokens, selected in zip(lay_out(record(chunks), chosen), chunks, chosen, strict=True):
        inside = sorted({i for i in selected if 0 <= i < len(tokens)})
        assert (passage.tokens, passage.marked, passage.cut) == (len(tokens), len(inside), 0)
        assert "".join(p.text for p in passage.pieces) == clean("".join(tokens)) or "\r" in "".join(tokens)
        kinds = [p.kind for p in passage.pieces for _ in range(p.tokens)]
        assert [i for i, kind in enumerate(kinds) if kind == "mark"] == inside
        for i, kind in enumerate(kinds):
            if kind == "gap":
                assert all(abs(i - at) > NEAR for at in inside)
        for piece in passage.pieces:
            assert piece.kind != "gap" or piece.tokens > NEAR


def test_without_a_selection_nothing_is_marked():
    (passage,) = lay_out(record([["a"] * 50]), None)
    assert [(p.kind, p.tokens) for p in passage.pieces] == [("gap", 50)]


def test_what_has_no_room_is_counted_and_marks_come_first():
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    chunks = [["<&>x" for _ in range(5000)] for _ in range(3)]
    chosen = [sorted(rng.sample(range(5000), 10)) for _ in chunks]
    passages = lay_out(record(chunks), chosen)
    assert sum(len(p.text) for passage in passages for p in passage.pieces) < ROOM
    for passage in passages:
        assert passage.cut == sum(p.tokens for p in passage.pieces if not p.text) > 0
        assert sum(p.tokens for p in passage.pieces) == 5000
        assert sum(p.tokens for p in passage.pieces if p.kind == "mark") == 10


@given(st.text())
def test_clean_text_can_be_shown_and_keeps_what_could_be(text):
    shown = clean(text)
    assert len(shown) == len(text)
    shown.encode("utf-8")
    assert clean(shown) == shown
    for before, after in zip(text, shown, strict=True):
        assert before == after or not before.isprintable()


def test_hidden_characters_become_visible():
    assert clean("a\x00\x1b\x7f\n\t\ud800\u202e") == "a␀␛␡\n\t\ufffd\ufffd"


@given(st.floats(-1e300, 1e300))
def test_a_figure_is_right_to_its_digits(value):
    assert float(figure(value)) == pytest.approx(value, rel=0.06, abs=0) or abs(value) < 1e-300


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, DASH), (0.0, "0"), (0.0123456, "0.0123"), (1.5, "1.50"), (123.4, "123"), (2e-7, "2.0e-07")],
)
def test_figures(value, shown):
    assert figure(value) == shown


def test_units():
    assert (percent(0.051), milliseconds(812.3), milliseconds(12345.0)) == ("5.1\u00a0%", "812\u00a0ms", "12.35\u00a0s")
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, True, "3", {}, []])
def test_what_is_no_figure_is_not_measured(value):
    assert measured({"a": {"b": value}}, "a", "b") is None
    assert measured({"a": value}, "a", "b") is None
    assert measured(None, "a") is None


@pytest.mark.parametrize(
    ("mode", "name", "series"),
    [
        ("full", "full", "full"),
        ("epic@16", "epic", "epic"),
        ("cacheblend@0.15", "cacheblend", "cacheblend"),
        ("blend:head_query@0.05", "blend", "head_query"),
        ("blend:head_query@5e-02+js", "blend", "head_query+js"),
        ("blend:strided@0.03-shift", "blend", "strided-shift"),
        ("blend:strided", "blend", "strided"),
    ],
)
def test_names_of_modes(mode, name, series):
    assert (data.name({"mode": mode}), data.series({"mode": mode})) == (name, series)


def test_the_front_is_what_nothing_beats():
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    points = [({"mode": str(i)}, (rng.random(), 0, 0), rng.random()) for i in range(40)]
    for sign in (-1, 1):
        beaten = [
            any(q[1][0] >= p[1][0] and sign * q[2] >= sign * p[2] and q is not p for q in points) for p in points
        ]  # fmt: skip
        assert {id(p) for p in plots._front(points, sign)} == {
            id(p) for p, b in zip(points, beaten, strict=True) if not b
        }


def report(changes=None, **options):
    run = fake_run(SEED, items=6, tokens=10, **options)
    rows = summarise(run)
    for row in rows:
        row.update((changes or {}).get(row["mode"], {}))
    return data.Report(run, rows)


def against_full(estimate, low, high):
    noise = low is not None and low <= 0 <= high
    return {
        "against": {
            "full": {"f1": {"n": 6, "ties": 1, "estimate": estimate, "low": low, "high": high, "within_noise": noise}}
        }
    }


def test_the_words_say_what_noise_hides():
    told = words.verdict(
        report(
            {
                "reuse": against_full(-0.2, -0.3, -0.1),
                "epic@16": against_full(0.1, 0.05, 0.15),
                "blend:strided@0.03": against_full(0.01, -0.07, 0.09),
            },
            modes=["full", "reuse", "epic@16", "blend:strided@0.03"],
        )
    )[0]
    assert "strided@0.03 is within noise of full prefill; 6 items cannot rule out a difference of up to 0.09." in told
    assert "reuse (-0.200) is below it by more than noise" in told
    assert "epic@16 (+0.100) is above it by more than noise" in told


def test_answers_that_are_equal_are_not_called_noise():
    run = fake_run(SEED, items=5, modes=["full", "reuse"], tokens=10)
    same = replace(run, results=[replace(r, f1=0.0) for r in run.results])
    told = words.verdict(data.Report(same, summarise(same)))[0]
    assert "reuse is equal to full prefill in every item" in told
    assert "noise" not in told


def test_one_item_tells_nothing_of_noise():
    told = words.verdict(report({"reuse": against_full(0.0, -math.inf, math.inf)}, modes=["full", "reuse"]))[0]
    assert "Too few items" in told
    assert "within noise" not in told


def test_the_closest_blend_and_the_published_rule_are_named():
    found = report()
    told = " ".join(words.verdict(found))
    best = min((r for r in found.rows if "@" in r["mode"]), key=lambda r: r["kl"])
    assert found.closest is best
    assert f"Closest to full prefill is {data.short(best['mode'])}, with a KL of {figure(best['kl'])}" in told
    assert f"at a speed-up of {best['speedup']['estimate']:.2f}x" in told
    ratio = best["against"]["cacheblend@0.15"]["kl"]["words"]
    assert "CacheBlend as published (cacheblend@0.15, 20.0\u00a0% spent)" in told
    assert f"the KL of {data.short(best['mode'])} against it is {ratio}." in told
    assert "Slower" not in told


def test_what_is_slower_is_said():
    slow = {"speedup": {"estimate": 0.8, "low": 0.7, "high": 0.9}}
    assert "Slower than full prefill here: epic@16." in " ".join(words.verdict(report({"epic@16": slow})))


def test_predictions_meet_what_they_predict():
    found = report()
    for mode, pairs in data.predictions(found).items():
        results = [r for r in found.run.results if r.mode == mode]
        assert [p for p, _ in pairs] == [r.predicted_s["total"] for r in results]
        assert [t for _, t in pairs] == pytest.approx(
            [sum(r.stages_s.values()) - r.stages_s["question"] for r in results]
        )
    bare = replace(found.run, results=[replace(r, predicted_s=None) for r in found.run.results])
    assert data.predictions(data.Report(bare, found.rows)) == {}
