"""F1, exact match and ceilings worked out by hand; Rouge-L against a longest common subsequence of our own."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendkv.errors import InputError, MissingDependencyError
from blendkv.eval import metrics
from blendkv.eval.metrics import ceiling, exact_match, f1, first_line, normalise, rouge_l

WORDS = st.lists(st.sampled_from(["red", "fox", "runs", "seven", "hills", "quickly"]), max_size=8).map(" ".join)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=40)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The Cat's  hat!", "cats hat"),
        ("An apple\na day", "apple day"),
        ("theatre, another", "theatre another"),
        ("U.S.A.", "usa"),
        ("«Ärger»", "«ärger»"),  # SQuAD strips ASCII punctuation only
        ("the", ""),
    ],
)
def test_normalise(text, plain):
    assert normalise(text) == plain


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("The Exeter College", ["Exeter College"], 1.0),
        ("He went to Exeter College", ["Exeter College"], 2 * 2 / (5 + 2)),
        ("b b a1", ["b a1 a1"], 2 * 2 / 6),  # repeated words count as often as both have them
        ("Paris", ["London", "Paris, France"], 2 * 1 / 3),
        ("no idea", ["Paris"], 0.0),
        ("", [""], 1.0),
        ("the", ["!"], 1.0),
        ("", ["Paris"], 0.0),
        ("Paris", ["the"], 0.0),
    ],
)
def test_f1(prediction, answers, expected):
    assert f1(prediction, answers) == pytest.approx(expected)


def test_exact_match():
    assert exact_match("The Kinks.", ["kinks"]) == 1.0
    assert exact_match("Kinks band", ["kinks", "the band"]) == 0.0
    assert exact_match("", ["the"]) == 1.0


@given(TEXT, st.lists(TEXT, min_size=1, max_size=3))
def test_scores_agree_with_one_another(prediction, answers):
    score = f1(prediction, answers)
    assert 0 <= score <= 1
    assert score == max(f1(prediction, [a]) for a in answers)
    assert f1(prediction, [prediction]) == 1.0
    if exact_match(prediction, answers):
        assert score == 1.0


def subsequence(a: list[str], b: list[str]) -> int:
    best = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            best[i + 1][j + 1] = best[i][j] + 1 if x == y else max(best[i][j + 1], best[i + 1][j])
    return best[-1][-1]


@given(WORDS, WORDS)
def test_rouge_l_is_the_longest_common_subsequence(prediction, reference):
    a, b = prediction.split(), reference.split()
    shared = subsequence(a, b)
    expected = 2 * shared / (len(a) + len(b)) if shared else 0.0
    assert rouge_l(prediction, [reference]) == pytest.approx(expected)
    assert rouge_l(prediction, [reference, "nothing shared"]) == pytest.approx(expected)


def test_rouge_l_stems_its_words():
    assert rouge_l("foxes running", ["fox runs"]) == 1.0


def test_rouge_l_says_what_to_install(monkeypatch):
    metrics._rouge.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'blendkv\[eval\]'"):
        rouge_l("a", ["b"])


@pytest.mark.parametrize("measure", [f1, exact_match, rouge_l])
@pytest.mark.parametrize("answers", [[], "Paris"])
def test_no_answers_to_compare_with(measure, answers):
    with pytest.raises(InputError, match="a sequence of one text or more"):
        measure("Paris", answers)


def test_ceiling():
    contexts = ["He was born in New-York.", "The capital is Paris, they say."]
    assert ceiling(["paris"], contexts)
    assert ceiling(["Rome", "the capital is Paris"], contexts)
    assert not ceiling(["par"], contexts)  # whole words
    assert not ceiling(["say he"], contexts)  # not across passages
    assert not ceiling(["the"], contexts)  # nothing is left of it
    assert not ceiling(["Paris"], [])


def test_ceiling_of_an_answer_in_parts():
    contexts = ["Ann founded it.", "Bob founded it."]
    assert not ceiling(["Ann and Bob"], contexts)
    assert ceiling(["Ann and Bob"], contexts, parts=["Bob", "Ann"])
    assert not ceiling(["Ann and Bob"], contexts[:1], parts=["Bob", "Ann"])


def test_first_line():
    assert first_line("\n  \n Paris. \nIt is the capital.") == "Paris."
    assert first_line(" \n\t") == ""
