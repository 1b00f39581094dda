"""Life tables and what holding a block yields: by hand, against brute force, and against known distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendkv.errors import InputError
from blendkv.market.survival import BINS, EDGES, WIDTHS, Prior, bin_of, holding_rates, steady_hazards

hazard_rows = st.lists(st.floats(0.0, 0.999), min_size=BINS, max_size=BINS)


def brute_rate(hazards: list[float], start: int) -> float:
    """The largest P(used) / E[seconds held] over all horizons, term by term."""
    best, reach, used, held = 0.0, 1.0, 0.0, 0.0
    for place in range(start, BINS):
        used += reach * hazards[place]
        held += reach * float(WIDTHS[place]) * (1.0 - hazards[place] / 2)
        reach *= 1.0 - hazards[place]
        best = max(best, used / held)
    return best


@settings(max_examples=50, deadline=None)
@given(hazard_rows, st.integers(0, BINS - 1))
def test_rate_is_the_best_over_all_horizons(hazards: list[float], start: int) -> None:
    rates, horizons = holding_rates(np.array([hazards]))
    assert rates[0, start] == pytest.approx(brute_rate(hazards, start), rel=1e-9, abs=1e-300)
    assert horizons[0, start] > 0


def test_two_bins_by_hand() -> None:
    # Used with 0.2 in the first quarter second, with 0.9 in the next bin, never after.
    hazards = np.zeros((1, BINS))
    hazards[0, :2] = 0.2, 0.9
    rates, horizons = holding_rates(hazards)
    first = 0.2 / (0.25 * 0.9)  # 0.889 per second if given up after the first bin
    both = (0.2 + 0.8 * 0.9) / (0.25 * 0.9 + 0.8 * float(WIDTHS[1]) * 0.55)  # 3.39: holding on pays
    assert both > first
    assert rates[0, 0] == pytest.approx(both)
    assert horizons[0, 0] == pytest.approx(EDGES[2])
    assert rates[0, 2] == 0.0


@pytest.mark.parametrize("interval", [10.0, 300.0, 5000.0])
def test_random_use_yields_its_rate_at_every_age(interval: float) -> None:
    rates, _ = holding_rates(steady_hazards(interval)[None])
    # Whole bins are coarse where they are as wide as the interval.
    young = [rates[0, place] for place in range(BINS) if EDGES[place] < interval / 4]
    assert young == pytest.approx([1 / interval] * len(young), rel=0.25)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.0, 0.99), st.floats(0.5, 5000.0), st.floats(0.3, 3.0))
def test_prior_uses_what_it_says(reuse: float, gap: float, spread: float) -> None:
    hazards = Prior(reuse, gap, spread).hazards()
    assert ((hazards >= 0) & (hazards < 1)).all()
    used = 1.0 - math.prod(1.0 - hazard for hazard in hazards.tolist())
    # What falls behind the last edge, after 36 hours, is not counted.
    assert used <= reuse + 1e-9
    if gap * math.exp(3 * spread) < EDGES[-1]:
        assert used == pytest.approx(reuse, abs=0.01)


def test_ages_fall_into_their_bins() -> None:
    assert bin_of(0.0) == bin_of(-5.0) == 0
    assert bin_of(1e9) == BINS - 1
    for place in range(BINS - 1):
        assert bin_of(EDGES[place]) == place
        assert bin_of(math.nextafter(EDGES[place + 1], 0.0)) == place


@pytest.mark.parametrize(
    ("reuse", "gap", "spread"), [(1.0, 1.0, 1.0), (-0.1, 1.0, 1.0), (0.5, 0.0, 1.0), (0.5, 1.0, 0)]
)
def test_impossible_priors_are_refused(reuse: float, gap: float, spread: float) -> None:
    with pytest.raises(InputError):
        Prior(reuse, gap, spread)
