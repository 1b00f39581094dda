"""Selectors: the right number of tokens, the right ones, and probes among them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendkv.blend import SELECTORS, SelectionContext
from blendkv.blend.layout import Span
from blendkv.blend.select import HEAD, PROBES, choose
from blendkv.errors import InputError


@st.composite
def contexts(draw):
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    gaps = draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    spans, at = [], 0
    for index, (length, gap) in enumerate(zip(lengths, gaps, strict=True)):
        at += gap
        spans.append(Span(index, "chunk", at, at + length, True, False))
        at += length
    count = draw(st.integers(0, sum(lengths)))
    scores = torch.tensor(draw(st.lists(st.floats(0, 1, width=32), min_size=at, max_size=at)))
    return SelectionContext(tuple(spans), count, scores, draw(st.integers(0, 1 << 31)))


@pytest.mark.parametrize("name", SELECTORS.names())
@given(context=contexts())
def test_every_selector_spends_its_count_inside_the_candidates(name, context):
    chosen = SELECTORS.get(name).choose(context)
    positions = chosen.positions.tolist()
    assert positions == sorted(set(positions))
    assert len(positions) == context.count
    allowed = {p for s in context.spans for p in range(s.start, s.stop)}
    assert set(positions) <= allowed
    heads = {p for s in context.spans for p in range(s.start, s.start + HEAD)}
    assert set(chosen.probes.tolist()) <= set(positions) - heads


@pytest.mark.parametrize("name", SELECTORS.names())
@given(context=contexts(), probes=st.integers(1, 20))
def test_probes_of_ones_own(name, context, probes):
    """Evenly spaced tokens behind the chunks' heads join what a rule chooses, within the count."""
    chosen = choose(SELECTORS.get(name), context, probes)
    positions = chosen.positions.tolist()
    assert positions == sorted(set(positions))
    assert len(positions) <= context.count
    assert set(chosen.probes.tolist()) <= set(positions)
    for span in context.spans:
        own = chosen.probes[(chosen.probes >= span.start) & (chosen.probes < span.stop)]
        assert len(own) <= min(probes, max(0, len(span) - HEAD))
        assert (own >= span.start + HEAD).all()
    wanted = sum(min(probes, max(0, len(s) - HEAD)) for s in context.spans)
    assert len(chosen.probes) == min(wanted, context.count // 2)
    if name == "chunk_head" and context.count >= 2 * wanted:
        assert len(positions) == context.count, "there is room, and the rule has more to give"


def spans(*lengths: int) -> tuple[Span, ...]:
    found, at = [], 0
    for i, n in enumerate(lengths):
        found.append(Span(i, "chunk", at, at + n, True, False))
        at += n
    return tuple(found)


def test_head_query_by_hand():
    scores = torch.zeros(100)
    scores[[57, 58, 90]] = torch.tensor([0.3, 0.9, 0.5])
    context = SelectionContext(spans(50, 50), 2 * (HEAD + PROBES) + 2, scores, 0)
    chosen = SELECTORS.get("head_query").choose(context)
    picked = set(chosen.positions.tolist())
    assert {0, 1, 2, 3, 50, 51, 52, 53, 58} <= picked
    assert len(chosen.probes) == 2 * PROBES
    assert 90 in picked or 90 in chosen.probes.tolist()


def test_strided_by_hand():
    chosen = SELECTORS.get("strided").choose(SelectionContext(spans(24), 9, torch.zeros(24), 0))
    assert chosen.positions.tolist() == [0, 1, 2, 3, 6, 10, 14, 18, 22]
    assert chosen.probes.tolist() == [6, 10, 14, 18, 22]


def test_chunk_head_by_hand():
    chosen = SELECTORS.get("chunk_head").choose(SelectionContext(spans(10, 2, 10), 9, torch.zeros(22), 0))
    assert chosen.positions.tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 14]


def test_score_rules_take_the_best():
    scores = torch.arange(20, dtype=torch.float32)
    for name in ("query_attention", "kv_deviation", "kv_deviation_k", "kv_deviation_kv"):
        chosen = SELECTORS.get(name).choose(SelectionContext(spans(10, 10), 3, scores, 0))
        assert chosen.positions.tolist() == [17, 18, 19]


def test_random_is_fixed_by_the_seed():
    def pick(seed):
        return (
            SELECTORS.get("random").choose(SelectionContext(spans(200), 20, torch.zeros(200), seed)).positions.tolist()
        )

    assert pick(1) == pick(1)
    assert pick(1) != pick(2)


def test_an_unknown_selector_lists_the_known_ones():
    with pytest.raises(InputError, match=r"unknown selector 'foo'; allowed: head_query, strided"):
        SELECTORS.get("foo")
