"""Two runs against each other: a run equals itself, a known change is found, what cannot be compared is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from eval_runs import fake_run
from tiny import seed_of_run

from blendkv.errors import InputError
from blendkv.eval.compare import compare, describe, differing

SEED = seed_of_run()
MODES = ("full", "reuse", "blend:head_query@0.05")


@pytest.fixture(scope="module")
def run():
    print(f"seed {SEED}")
    return fake_run(SEED, modes=MODES, tokens=12)


def changed(run, **change):
    """The same run with figures changed by functions of them."""
    results = [replace(r, **{key: by(getattr(r, key)) for key, by in change.items()}) for r in run.results]
    return replace(run, results=results, meta=dict(run.meta))


def test_a_run_against_itself_is_equal(run):
    rows = compare(run, run)
    assert [row["mode"] for row in rows] == list(MODES)
    for row in rows:
        assert row["n"] == len(run.items)
        assert row["rouge_l"] is None
        assert (row["kl"] is None) == (row["mode"] == "full")
        for key, neutral in (("kl", 1.0), ("f1", 0.0), ("ttft", 1.0)):
            if row[key] is not None:
                assert row[key]["estimate"] == pytest.approx(neutral)
                assert row[key]["within_noise"]
                assert row[key]["ties"] == row["n"]
    assert differing(run, run) == []


def test_a_known_change_is_found(run):
    other = changed(run, kl=lambda v: 2 * v, f1=lambda v: v + 0.125, ttft_s=lambda v: [4 * t for t in v])
    row = next(r for r in compare(run, other) if r["mode"] == MODES[2])
    assert row["kl"]["estimate"] == pytest.approx(0.5)
    assert row["f1"]["estimate"] == pytest.approx(-0.125)
    assert row["ttft"]["estimate"] == pytest.approx(0.25)
    assert row["ttft"]["b"] == pytest.approx(4 * row["ttft"]["a"])
    assert not any(row[key]["within_noise"] for key in ("kl", "f1", "ttft"))
    assert row["kl"]["losses"] == row["n"]


def test_items_are_paired_by_id_whatever_their_order(run):
    part = replace(run, results=list(reversed(run.results))[2:])
    rows = compare(run, part)
    counts = {mode: sum(r.mode == mode for r in part.results) for mode in MODES}
    assert {row["mode"]: row["n"] for row in rows} == counts
    assert all(row["f1"]["ties"] == row["n"] for row in rows)


def test_only_what_both_have_is_compared(run):
    other = fake_run(SEED + 1, modes=("reuse", "epic@16"), tokens=12)
    items = {name: run.items[name] for name in list(run.items)[:3]}
    other = replace(other, items=items)
    (row,) = compare(run, other)
    assert (row["mode"], row["n"]) == ("reuse", 3)


def test_time_is_not_compared_while_correctness_is_red(run):
    red = replace(run, meta={**run.meta, "correct": False})
    for one, other in ((run, red), (red, run)):
        assert all(row["ttft"] is None and row["f1"] is not None for row in compare(one, other))


def test_one_item_has_no_interval_and_json_has_no_infinity(run):
    one = replace(run, items=dict(list(run.items.items())[:1]))
    rows = compare(one, one)
    assert rows[1]["f1"]["low"] is None
    assert "too few items" in rows[1]["f1"]["words"]
    json.dumps(rows, allow_nan=False)


def test_kl_that_is_rounding_is_left_out(run):
    zero = changed(run, kl=lambda v: 0.0)
    assert all(row["kl"] is None for row in compare(run, zero))


def test_differing_settings_are_listed(run):
    other = replace(
        run, meta={**run.meta, "threads": 8, "settings": {**run.meta["settings"], "chunks": 3}, "config": "x"}
    )
    assert differing(run, other) == [
        {"setting": "threads", "a": 1, "b": 8},
        {"setting": "settings.chunks", "a": 6, "b": 3},
    ]
    other.meta["environment"] = {**run.meta["environment"], "gpu": "H200", "date": "2027-01-01"}
    assert {"setting": "environment.gpu", "a": None, "b": "H200"} in differing(run, other)
    assert not [d for d in differing(run, other) if "date" in d["setting"]]


def test_runs_without_a_common_mode_or_item_are_refused(run):
    with pytest.raises(InputError, match=r"no mode in common \(.*reuse.*; prefix\).*--modes"):
        compare(run, fake_run(SEED, modes=["prefix"], tokens=12))
    other = replace(run, items={f"other {name}": record for name, record in run.items.items()})
    with pytest.raises(InputError, match=r"no item in common .no id is in both"):
        compare(run, other)
    asked = replace(run, items={name: replace(record, question="?") for name, record in run.items.items()})
    with pytest.raises(InputError, match="8 items have the same id but another question"):
        compare(run, asked)


def test_the_table_for_people_has_both_means_and_the_words(run):
    other = changed(run, kl=lambda v: 2 * v)
    rows = compare(run, other)
    columns, cells = describe(rows)
    assert columns == ("mode", "n", "KL", "F1", "TTFT ms")
    assert [cell[:2] for cell in cells] == [(row["mode"], row["n"]) for row in rows]
    assert cells[0][2] is None
    assert cells[2][2] == f"{rows[2]['kl']['a']:.3g} / {rows[2]['kl']['b']:.3g}: {rows[2]['kl']['words']}"
    assert "lower: 0.50x" in cells[2][2]
    assert all(math.isfinite(row["f1"]["a"]) for row in rows)
