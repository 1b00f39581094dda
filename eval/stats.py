"""Standard errors, bounds and paired comparisons of figures measured per item, by bootstrap over the items.

Intervals and bounds are BCa bootstrap ones (bias-corrected and accelerated; Efron 1987, J. Am. Stat. Assoc. 82, 171):
KL and time are skewed, and percentile bounds of a skewed mean lie too low. Few items and a heavy tail still cover less
than they say: in simulation with 24 items, a 95 % upper bound held for 94 % of normal, 92 % of exponential and 86 % of
log-normal (sigma 1) samples; the percentile bound for 94, 89 and 82 %. Equal values give an interval without width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

from blendkv.errors import InputError

Values = Sequence[float] | npt.NDArray[np.float64]

RESAMPLES = 2000
_BATCH = 1 << 22
"""Most values that are drawn at once: 32 MiB of them."""
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its interval; infinite ends where there are too few items to say."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """Two modes over the same items.

    Attributes
    ----------
    n
        Items.
    wins, losses, ties
        Items in which ``a`` is higher than ``b``, lower, or equal. Which of them is good depends on the figure.
    estimate
        Mean of ``a - b``, or geometric mean of ``a / b``.
    low, high
        Its 95 % interval; infinite (0 below, for a ratio) with fewer than two items.
    within_noise
        The interval holds 0 (a difference) or 1 (a ratio).
    words
        The same for people.
    left_out
        Items that a ratio leaves out because a value is 0 or less.
    """

    n: int
    wins: int
    losses: int
    ties: int
    estimate: float
    low: float
    high: float
    within_noise: bool
    words: str
    left_out: int = 0


def bootstrap_se(values: Values, seed: int = 0, resamples: int = RESAMPLES) -> float | None:
    """Standard error of the mean: standard deviation of the means of resampled items; None below two items.

    Raises
    ------
    InputError
        If a value is not finite.
    """
    array = _checked(values)
    if len(array) < 2:
        return None
    return float(_means(array, seed, resamples).std(ddof=1))


def mean_ci(values: Values, level: float = 0.95, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The mean with a two-sided BCa interval.

    Raises
    ------
    InputError
        If there is no value, one is not finite, or ``level`` is not inside (0, 1).
    """
    tail = (1 - _checked_level(level)) / 2
    array = _some(values)
    low, high = _ends(array, (tail, 1 - tail), seed, resamples)
    return Interval(float(array.mean()), low, high)


def upper_bound(values: Values, level: float = 0.95, seed: int = 0, resamples: int = RESAMPLES) -> float:
    """One-sided upper bound of the mean, by BCa bootstrap; infinite below two items.

    Raises
    ------
    InputError
        If a value is not finite, or ``level`` is not inside (0, 1).
    """
    _checked_level(level)
    return _ends(_checked(values), (1 - level, level), seed, resamples)[1]


def lower_bound(values: Values, level: float = 0.95, seed: int = 0, resamples: int = RESAMPLES) -> float:
    """One-sided lower bound of the mean, by BCa bootstrap; minus infinite below two items.

    Raises
    ------
    InputError
        If a value is not finite, or ``level`` is not inside (0, 1).
    """
    _checked_level(level)
    return _ends(_checked(values), (1 - level, level), seed, resamples)[0]


def paired(a: Values, b: Values, *, kind: Literal["difference", "ratio"] = "difference", seed: int = 0) -> Paired:
    """Compare ``a`` with ``b`` item by item, with a 95 % BCa interval over the items.

    ``difference`` is the mean of ``a - b``; ``ratio`` is the geometric mean ``exp(mean(log a - log b))``. A ratio of
    zeros has no logarithm: items with a value of 0 or less are left out of the ratio and its interval, counted in
    ``left_out``, named in ``words``, and still count as wins, losses or ties.

    Raises
    ------
    InputError
        If the lengths differ, there is no item, a value is not finite, the kind is unknown, or no item has two
        positive values for a ratio.
    """
    first, second = _checked(a), _checked(b)
    if len(first) != len(second) or not len(first):
        raise InputError(f"{len(first)} values against {len(second)}; one pair of values or more is needed, per item")
    if kind not in ("difference", "ratio"):
        raise InputError(f"unknown kind {kind!r} of comparison; allowed: difference, ratio")
    higher, lower = int((first > second).sum()), int((first < second).sum())
    counts = (higher, lower, len(first) - higher - lower)
    left_out = 0
    if kind == "ratio":
        kept = (first > 0) & (second > 0)
        left_out = int(len(kept) - kept.sum())
        if not kept.any():
            raise InputError("no item has two positive values; compare these by kind='difference'")
        values = np.log(first[kept]) - np.log(second[kept])
    else:
        values = first - second
    ends = (float(values.mean()), *_ends(values, (0.025, 0.975), seed, RESAMPLES))
    within_noise = ends[1] <= 0 <= ends[2]
    if kind == "ratio":
        ends = (math.exp(ends[0]), math.exp(ends[1]), math.exp(ends[2]))
    words = _words(kind, ends, within_noise, counts, left_out)
    return Paired(len(first), *counts, *ends, within_noise, words, left_out)


def _words(
    kind: str, ends: tuple[float, float, float], within_noise: bool, counts: tuple[int, int, int], left_out: int
) -> str:
    higher, lower, ties = counts
    n = higher + lower + ties
    note = f"; {left_out} left out, not above 0" if left_out else ""
    if n - left_out < 2:
        return f"too few items to say (n = {n}{note})"
    if ties == n:
        return f"equal in every item (n = {n}{note})"
    if within_noise:
        return f"within noise (n = {n}{note})"
    estimate, low, high = (f"{v:.2f}x" if kind == "ratio" else f"{v:+.3g}" for v in ends)
    is_lower = ends[0] < (1 if kind == "ratio" else 0)
    agreeing = lower if is_lower else higher
    said = f"{'lower' if is_lower else 'higher'}: {estimate} [{low.rstrip('x')}, {high.rstrip('x')}]"
    return f"{said}, {agreeing} of {n} items{note}"


def _ends(
    values: npt.NDArray[np.float64], tails: tuple[float, float], seed: int, resamples: int
) -> tuple[float, float]:
    """BCa quantiles of the bootstrapped mean at the two ``tails``; infinite below two values."""
    if len(values) < 2:
        return -math.inf, math.inf
    mean = float(values.mean())
    if np.ptp(values) == 0:
        return mean, mean
    means = _means(values, seed, resamples)
    below = (np.count_nonzero(means < mean) + np.count_nonzero(means == mean) / 2) / resamples
    bias = _NORMAL.inv_cdf(min(max(below, 1 / resamples), 1 - 1 / resamples))
    # The jackknife's deviations of a mean are the values' own, up to a factor that cancels out.
    deviations = values - mean
    acceleration = float((deviations**3).sum() / (6 * (deviations**2).sum() ** 1.5))
    shares = []
    for tail in tails:
        z = bias + _NORMAL.inv_cdf(tail)
        shares.append(_NORMAL.cdf(bias + z / max(1 - acceleration * z, 1e-9)))
    low, high = np.quantile(means, shares)
    return float(low), float(high)


def _means(values: npt.NDArray[np.float64], seed: int, resamples: int) -> npt.NDArray[np.float64]:
    """Means of ``resamples`` draws of ``len(values)`` items with replacement."""
    if resamples < 100:
        raise InputError(f"{resamples} resamples; 100 or more are needed for a standard error or a bound")
    rng = np.random.default_rng(seed)
    step = max(1, _BATCH // len(values))
    rows = (min(step, resamples - first) for first in range(0, resamples, step))
    draws = (values[rng.integers(0, len(values), (count, len(values)))].mean(1) for count in rows)
    return np.concatenate(list(draws))


def _checked(values: Values) -> npt.NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not np.isfinite(array).all():
        raise InputError("values must be one finite number per item; leave out items that were not measured")
    return array


def _some(values: Values) -> npt.NDArray[np.float64]:
    array = _checked(values)
    if not len(array):
        raise InputError("no values; measure one item or more")
    return array


def _checked_level(level: float) -> float:
    if not 0 < level < 1:
        raise InputError(f"level {level}; a share between 0 and 1 is allowed, such as 0.95")
    return level
