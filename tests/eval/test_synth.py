"""Generated items: the same everywhere, answered by their documents and by nothing else in them."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.errors import InputError
from blendkv.eval.metrics import ceiling, f1, normalise
from blendkv.eval.synth import DEFAULT_COUNT, MIXED, generate, parse_spec
from blendkv.eval.synth_kinds import KINDS, Difficulty
from blendkv.eval.synth_words import Names

SEEDS = st.integers(-(2**40), 2**40)
SHARED = {"distractors": st.integers(0, 9), "filler": st.integers(55, 280)}


def one(kind, seed, **knobs):
    return generate([kind], 1, seed, Difficulty(**knobs))[0]


def facts(item):
    """Documents by index: title and body."""
    return [tuple(c.rstrip("\n").split("\n", 1)) for c in item.contexts]


def holding(item, words):
    return [i for i, text in enumerate(item.contexts) if f" {normalise(words)} " in f" {normalise(text)} "]


def test_the_same_seed_gives_the_same_items_in_another_process():
    code = (
        "from blendkv.eval.synth import generate, parse_spec\n"
        "print(hash(0), [(i.id, i.question, i.answers, i.contexts, dict(i.meta)) for i in "
        "generate(parse_spec('mixed')[0], 8, 11)])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    here = [(i.id, i.question, i.answers, i.contexts, dict(i.meta)) for i in generate(KINDS.names(), 8, 11)]
    assert runs[0].strip() == f"{hash(0)} {here}"
    assert generate(KINDS.names(), 8, 11) != generate(KINDS.names(), 8, 12)


@settings(max_examples=40)
@given(SEEDS, st.sampled_from(KINDS.names()), st.fixed_dictionaries(SHARED))
def test_every_item_is_well_formed(seed, kind, knobs):
    item = one(kind, seed, **knobs)
    assert item == one(kind, seed, **knobs)
    assert item.meta["kind"] == kind
    assert ceiling(item.answers, item.contexts, item.meta.get("parts", ()))
    assert len(set(item.contexts)) == len(item.contexts)
    for text in item.contexts:
        assert re.fullmatch(r"[^\n]+\n[^\n]+\n\n", text)
        words = len(text.split())
        assert knobs["filler"] <= words <= knobs["filler"] + 75
    # Without the documents that hold the answer, it is nowhere.
    rest = [c for i, c in enumerate(item.contexts) if i not in item.meta["support"]]
    for part in item.meta.get("parts", item.answers):
        assert not ceiling([part], rest)


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 4), st.integers(0, 9))
def test_chains_chain(seed, hops, distractors):
    item = one("chain", seed, hops=hops, distractors=distractors)
    chain = item.meta["chain"]
    assert len(chain) == hops + 1
    assert len(item.contexts) == hops + distractors
    assert item.answers == (chain[-1],)
    documents = facts(item)
    for a, b in itertools.pairwise(chain):
        (document,) = set(holding(item, a)) & set(holding(item, b))
        assert documents[document][0] == a
        assert document in item.meta["support"]
    assert len(item.meta["support"]) == hops
    assert len(holding(item, chain[-1])) == 1
    # The question names the first link only.
    assert chain[0] in item.question
    assert not any(name in item.question for name in chain[1:])
    # A distractor names none of the chain.
    for i in set(range(len(documents))) - set(item.meta["support"]):
        assert not any(i in holding(item, name) for name in chain)


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 4), st.integers(0, 9))
def test_needles_are_in_documents_of_their_own(seed, values, distractors):
    item = one("needles", seed, values=values, distractors=distractors)
    parts = item.meta["parts"]
    assert len(parts) == values
    assert sorted(i for part in parts for i in holding(item, part)) == item.meta["support"]
    assert set(holding(item, item.meta["key"])) == set(item.meta["support"])
    for order in itertools.permutations(parts):
        assert ", ".join(order) in item.answers
        assert f1(" ".join(order), item.answers) == 1.0
    if values > 1:
        assert f1(parts[0], item.answers) < 1.0


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 4), st.integers(0, 9))
def test_a_looked_up_key_comes_once(seed, values, distractors):
    item = one("lookup", seed, values=values, distractors=distractors)
    (document,) = item.meta["support"]
    assert holding(item, item.meta["key"]) == [document] == holding(item, item.answers[0])
    (sentence,) = [s for s in re.split(r"(?<=\.) ", facts(item)[document][1]) if item.meta["key"] in s]
    assert item.answers[0] in sentence
    assert len(item.contexts) == 1 + distractors


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 4), st.integers(0, 9))
def test_the_last_value_in_the_prompt_is_the_answer(seed, values, distractors):
    item = one("updates", seed, values=values, distractors=distractors)
    told = [holding(item, value) for value in item.meta["values"]]
    assert [[i] for i in item.meta["support"]] == told
    assert item.meta["support"] == sorted(item.meta["support"])
    assert item.answers == (item.meta["values"][-1],)
    assert holding(item, item.meta["key"]) == item.meta["support"]
    # But for the values, later documents of the key say the same: only the order tells which is last.
    said = {
        re.search(rf"[^.\n]*{item.meta['key']} is now [^.]*\.", item.contexts[i])[0].replace(value, "").strip()
        for i, value in list(zip(item.meta["support"], item.meta["values"], strict=True))[1:]
    }
    assert len(said) <= 1


@settings(max_examples=25)
@given(SEEDS, st.sampled_from(KINDS.names()), st.integers(1, 5))
def test_documents_that_nothing_needs_are_filler(seed, kind, more):
    least = len(one(kind, seed).contexts)
    item = one(kind, seed, documents=least + more)
    assert len(item.contexts) == least + more
    assert len(item.meta["support"]) == len(one(kind, seed).meta["support"])
    with pytest.raises(InputError, match=f"documents={least - 1}.*need {least}"):
        one(kind, seed, documents=least - 1)


def test_names_stay_unique_when_their_parts_run_out():
    names = Names(random.Random(5))
    made = [make() for _ in range(400) for make in (names.word, names.person, names.place, names.motto)]
    assert len(set(made)) == len(made)


def test_the_most_that_knobs_allow():
    item = one("lookup", 0, distractors=199, values=4, documents=200, filler=55)
    assert len(item.contexts) == 200
    assert len(holding(item, item.meta["key"])) == 1


def test_kinds_take_turns():
    items = generate(["updates", "chain"], 5, 3)
    assert [i.meta["kind"] for i in items] == ["updates", "chain", "updates", "chain", "updates"]
    assert [i.id for i in items] == [f"synth-{n:04d}" for n in range(5)]
    assert items[:3] == generate(["updates", "chain"], 3, 3)


@pytest.mark.parametrize(
    ("spec", "kinds", "knobs"),
    [
        (MIXED, KINDS.names(), {}),
        ("", KINDS.names(), {}),
        ("needles", ("needles",), {}),
        ("hops=2,distractors=8", ("chain",), {"hops": 2, "distractors": 8}),
        ("filler=60", KINDS.names(), {"filler": 60}),
        ("values=3", ("needles", "lookup", "updates"), {"values": 3}),
        (" chain , updates,chain, documents = 9", ("chain", "updates"), {"documents": 9}),
    ],
)
def test_specs(spec, kinds, knobs):
    assert parse_spec(spec) == (list(kinds), Difficulty(**knobs))


@pytest.mark.parametrize("spec", ["chains", "hops", "hops=two", "hops=-1", "depth=2", "needles=2", "chain;updates"])
def test_wrong_specs_list_what_is_allowed(spec):
    with pytest.raises(InputError, match=r"allowed, with commas between: mixed, chain, .*hops=N"):
        parse_spec(spec)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Difficulty(hops=5), "hops=5 for generated items; a whole number from 1 to 4"),
        (lambda: Difficulty(filler=10), "filler=10"),
        (lambda: Difficulty(values=1.5), "values=1.5"),
        (lambda: generate(["chain"], 0), "0 generated items"),
        (lambda: generate([], 1), "of 0 kinds"),
        (lambda: generate(["riddle"], 1), "unknown kind of generated items 'riddle'; allowed: chain, needles"),
        (lambda: generate(["needles"], 1, 0, Difficulty(hops=2)), "needles has no hops; its knobs: "),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_the_default_count_holds_every_kind_alike():
    assert DEFAULT_COUNT % len(KINDS.names()) == 0
