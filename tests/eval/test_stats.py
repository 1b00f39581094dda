"""Bootstrap figures against closed forms, against scipy, and against simulated data whose mean is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as reference
from tiny import seed_of_run

from blendkv.errors import InputError
from blendkv.eval import stats
from blendkv.eval.stats import bootstrap_se, lower_bound, mean_ci, paired, upper_bound


@pytest.fixture
def skewed():
    seed = seed_of_run()
    print(f"seed {seed}")
    return np.random.default_rng(seed).lognormal(0, 1, 30)


def test_standard_error_is_the_known_one(skewed):
    """The standard deviation of a resampled mean is sqrt(sum (x - mean)^2) / n."""
    exact = math.sqrt(((skewed - skewed.mean()) ** 2).sum()) / len(skewed)
    assert bootstrap_se(skewed, resamples=40_000) == pytest.approx(exact, rel=0.03)
    assert bootstrap_se(skewed) == bootstrap_se(list(skewed))
    assert bootstrap_se(skewed, seed=1) != bootstrap_se(skewed, seed=2)


def test_too_few_items_are_said_to_be():
    assert bootstrap_se([1.0]) is None
    assert bootstrap_se([]) is None
    assert upper_bound([1.0]) == math.inf
    assert upper_bound([]) == math.inf
    assert lower_bound([1.0]) == -math.inf
    assert mean_ci([1.0]) == stats.Interval(1.0, -math.inf, math.inf)


def test_intervals_are_scipys_bca(skewed):
    ours = mean_ci(skewed, resamples=40_000)
    theirs = reference.bootstrap(
        (skewed,), np.mean, method="BCa", n_resamples=40_000, rng=np.random.default_rng(1), vectorized=True
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours.estimate == pytest.approx(skewed.mean())
    assert ours.low == pytest.approx(theirs.low, abs=0.05 * width)
    assert ours.high == pytest.approx(theirs.high, abs=0.1 * width)


def test_one_sided_bounds_are_ends_of_a_wider_tail(skewed):
    both = mean_ci(skewed, level=0.9)
    assert upper_bound(skewed, level=0.95) == pytest.approx(both.high)
    assert lower_bound(skewed, level=0.95) == pytest.approx(both.low)
    assert lower_bound(skewed) < skewed.mean() < upper_bound(skewed)
    assert lower_bound(-skewed) < -skewed.mean() < upper_bound(-skewed)


def test_equal_values_are_a_point():
    assert mean_ci([0.3] * 5) == stats.Interval(pytest.approx(0.3), pytest.approx(0.3), pytest.approx(0.3))
    assert upper_bound([0.0, 0.0]) == 0.0


def test_batches_do_not_change_the_result(skewed, monkeypatch):
    whole = stats._means(skewed, 0, 250)
    monkeypatch.setattr(stats, "_BATCH", 100 * len(skewed))
    assert np.array_equal(stats._means(skewed, 0, 250), whole)


@pytest.mark.parametrize(
    ("draw", "size", "least"),
    [
        (lambda rng, n: rng.normal(1, 1, n), 24, 0.90),
        (lambda rng, n: rng.exponential(1, n), 24, 0.85),
        (lambda rng, n: rng.lognormal(-0.5, 1, n), 48, 0.80),
    ],
)
def test_coverage_on_simulated_data(draw, size, least):
    """95 % intervals hold the true mean, 1, about as often as they say: less so for skewed data."""
    rng = np.random.default_rng(7)
    inside = above = 0
    runs = 300
    for _ in range(runs):
        values = draw(rng, size)
        interval = mean_ci(values, resamples=400)
        inside += interval.low <= 1 <= interval.high
        above += upper_bound(values, resamples=400) >= 1
    print(f"two-sided {inside / runs:.3f}, upper bound {above / runs:.3f}")
    assert least <= inside / runs <= 0.985
    assert least - 0.03 <= above / runs <= 0.99


def test_paired_difference():
    found = paired([3.0, 5.0, 2.0, 4.0], [1.0, 2.0, 2.0, 6.0])
    assert (found.n, found.wins, found.losses, found.ties, found.left_out) == (4, 2, 1, 1, 0)
    assert found.estimate == pytest.approx(0.75)
    assert found.low < 0 < found.high
    assert found.within_noise
    assert found.words == "within noise (n = 4)"


def test_paired_ratio_is_geometric(skewed):
    factors = np.resize([0.25, 0.5, 0.5, 1.0], 28)
    found = paired(skewed[:28] * factors, skewed[:28], kind="ratio")
    assert found.estimate == pytest.approx(0.5)
    assert 0.38 < found.low < 0.5 < found.high < 0.66
    assert not found.within_noise
    assert found.losses >= 21
    assert found.words == f"lower: 0.50x [{found.low:.2f}, {found.high:.2f}], {found.losses} of 28 items"
    opposite = paired(skewed[:28], skewed[:28] * factors, kind="ratio")
    assert opposite.estimate == pytest.approx(2)
    assert opposite.words.startswith("higher: 2.00x")
    assert opposite.low == pytest.approx(1 / found.high, rel=0.1)


def test_a_clear_difference_is_called_higher_or_lower(skewed):
    found = paired(skewed + 1 + 0.01 * np.sin(np.arange(30)), skewed)
    assert found.words.startswith("higher: +1 [+")
    assert found.words.endswith("30 of 30 items")
    assert paired(skewed, skewed + 1).words == "lower: -1 [-1, -1], 30 of 30 items"


def test_the_same_data_is_equal_and_noise_is_noise(skewed):
    assert paired(skewed, skewed).words == "equal in every item (n = 30)"
    shuffled = np.random.default_rng(3).normal(0, 1, (2, 40))
    assert paired(*shuffled).within_noise


def test_zeros_are_left_out_of_ratios_and_said_to_be():
    found = paired([0.0, 2.0, 2.0, 2.1, -1e-9], [1.0, 1.0, 1.0, 1.0, 0.0], kind="ratio")
    assert found.left_out == 2
    assert (found.wins, found.losses) == (3, 2)
    assert found.estimate == pytest.approx((2 * 2 * 2.1) ** (1 / 3))
    assert found.words == f"higher: 2.03x [{found.low:.2f}, {found.high:.2f}], 3 of 5 items; 2 left out, not above 0"
    with pytest.raises(InputError, match="no item has two positive values"):
        paired([0.0, 1.0], [1.0, 0.0], kind="ratio")


def test_one_pair_says_nothing():
    found = paired([2.0], [1.0], kind="ratio")
    assert (found.estimate, found.low, found.high, found.within_noise) == (2.0, 0.0, math.inf, True)
    assert found.words == "too few items to say (n = 1)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_ci([]), "no values"),
        (lambda: bootstrap_se([1.0, math.nan]), "finite"),
        (lambda: upper_bound([[1.0], [2.0]]), "one finite number per item"),
        (lambda: upper_bound([1.0, 2.0], level=95), "share between 0 and 1"),
        (lambda: bootstrap_se([1.0, 2.0], resamples=10), "100 or more"),
        (lambda: paired([1.0], [1.0, 2.0]), "1 values against 2"),
        (lambda: paired([], []), "one pair of values or more"),
        (lambda: paired([1.0], [1.0], kind="t-test"), "allowed: difference, ratio"),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises(InputError, match=message):
        call()
