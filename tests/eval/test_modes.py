"""Mode specs of an evaluation, and the budgets that published baselines really spend."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendkv.blend import BlendSettings, parse_mode
from blendkv.errors import InputError
from blendkv.eval.modes import EvalMode, Sizes, parse_eval_mode, parse_eval_modes

LENGTHS = st.lists(st.integers(1, 600), min_size=1, max_size=8)


def sizes(lengths, layers):
    return Sizes(lengths[1:], sum(lengths), layers)


@pytest.mark.parametrize("spec", ["full", "reuse", "blend:strided@0.03", "blend:random@0.1+js", "blend:strided@1+p8"])
def test_the_command_lines_own_modes(spec):
    mode = parse_eval_mode(spec)
    assert (mode.spec, mode.mode, mode.nominal, mode.prefix) == (spec, parse_mode(spec), None, False)
    assert mode.resolve(Sizes([5], 9, 4)) == parse_mode(spec)
    assert mode.exact == (spec == "full")


def test_one_name_for_one_mode():
    modes = parse_eval_modes("blend, blend:head_query@0.05 ,full,epic@032,epic@32, blend:strided@0.1+js")
    assert [m.spec for m in modes] == ["blend:head_query@0.05", "full", "epic@32", "blend:strided@0.1"]
    assert parse_eval_mode("blend:random@0.1+shift").spec == "blend:random@0.1+js"


def test_prefix_is_exact():
    mode = parse_eval_mode("prefix")
    assert mode.prefix
    assert mode.exact
    assert mode.resolve(Sizes([5], 9, 4)).settings is None


def test_cacheblend_by_hand():
    """30 layers, all of 1,000 candidates in 2 layers and 150 of them in 28, over 1,200 reusable tokens."""
    mode = parse_eval_mode("cacheblend@0.15")
    settings = mode.resolve(Sizes([400, 600], 1200, 30)).settings
    assert settings == BlendSettings("kv_deviation", (2 * 1000 + 28 * 150) / (30 * 1200), "off")
    assert mode.nominal == 0.15


def test_epic_by_hand():
    settings = parse_eval_mode("epic@32").resolve(Sizes([400, 20], 820, 30)).settings
    assert settings == BlendSettings("chunk_head", (32 + 20) / 820, "off")


@given(LENGTHS, st.integers(1, 40), st.floats(0.01, 1.0), st.integers(1, 700))
def test_budgets_are_budgets(lengths, layers, ratio, tokens):
    for spec in (f"cacheblend@{ratio}", f"epic@{tokens}"):
        settings = parse_eval_mode(spec).resolve(sizes(lengths, layers)).settings
        assert settings is not None
        assert 0.0 <= settings.asked <= 1.0


def test_no_chunk_is_left_alone():
    assert parse_eval_mode("epic@8").resolve(Sizes([], 0, 4)) == parse_mode("reuse")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no mode is given"),
        (" , ", "no mode is given"),
        ("fast", "prefix, cacheblend@RATIO and epic@TOKENS"),
        ("cacheblend", "unknown mode"),
        ("cacheblend@0", "more than 0 and at most 1"),
        ("cacheblend@1.5", "more than 0 and at most 1"),
        ("epic@0", "whole tokens"),
        ("epic@1.5", "whole tokens"),
        ("blend:nobody@0.1", "nobody"),
        ("blend:strided@2", "outside"),
        ("blend:strided@0.1+p0", "at least 1"),
    ],
)
def test_refused_in_words(text, words):
    with pytest.raises(InputError, match="(?s)" + words.replace("+", r"\+")):
        parse_eval_modes(text)


def test_a_mode_is_a_value():
    assert parse_eval_mode("full") == EvalMode("full", parse_mode("full"))
