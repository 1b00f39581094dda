"""Seconds of prefill and of loads."""

from __future__ import annotations

import pytest
from hypothesis import given as cases
from hypothesis import strategies as st

from blendkv.errors import InputError
from blendkv.market.costs import CostModel, given, quadratic_fit

GOOD = {"linear": 1e-4, "quadratic": 1e-8, "load_rate": 1e9, "load_latency": 1e-4, "token_bytes": 100}


@cases(st.lists(st.integers(1, 2000), min_size=1, max_size=20))
def test_costs_of_neighbouring_runs_add_up(runs: list[int]) -> None:
    costs, at, total = given(), 0, 0.0
    for tokens in runs:
        total += costs.prefill(at, tokens)
        at += tokens
    assert total == pytest.approx(costs.prefill(0, at))


def test_the_described_machine_by_hand() -> None:
    costs = given()
    assert costs.linear == pytest.approx(28.2e-6, rel=0.002)
    assert costs.quadratic == pytest.approx(1.06e-9, rel=0.002)
    # 8,192 tokens: 0.231 s of matrix products, 0.0356 s of attention; 21.5 ms to load their 1.07 GB.
    assert costs.prefill(0, 8192) == pytest.approx(0.231 + 0.0356, rel=0.005)
    assert costs.load(8192) == pytest.approx(0.0215, rel=0.005)
    assert costs.saved(0, 8192, blended=False) == pytest.approx(0.2668 - 0.0215, rel=0.01)
    assert costs.saved(0, 8192, blended=True) == pytest.approx(0.95 * 0.2668 - 0.0215, rel=0.01)


def test_two_prefills_give_both_constants() -> None:
    costs = CostModel(**GOOD)
    points = [(n, costs.prefill(0, n)) for n in (128, 1024)]
    assert quadratic_fit(*points) == pytest.approx((1e-4, 1e-8))
    assert quadratic_fit((100, 1.0), (200, 1.5)) == (0.0075, 0.0)  # the longer run is the cheaper one per token


@pytest.mark.parametrize("points", [((5, 1.0), (5, 2.0)), ((0, 1.0), (5, 2.0)), ((1, 0.0), (5, 2.0))])
def test_prefills_that_say_nothing_are_refused(points: tuple[tuple[int, float], tuple[int, float]]) -> None:
    with pytest.raises(InputError, match="a shorter and a longer one"):
        quadratic_fit(*points)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("linear", 0.0), ("linear", float("nan")), ("quadratic", -1.0), ("load_rate", float("inf")),
        ("load_latency", -1.0), ("token_bytes", 0), ("blend_budget", 1.1),
    ],
)  # fmt: skip
def test_impossible_costs_are_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{name} is"):
        CostModel(**{**GOOD, name: value})  # type: ignore[arg-type]
