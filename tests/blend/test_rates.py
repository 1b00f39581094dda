"""Rates learned from observations: they find the truth, ignore a wild one, and follow a change."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rates import teach
from tiny import seed_of_run

from blendkv.blend.rates import HALF_LIFE, READY, WINDOW, Line, Observation, RateBook, Work, pipelined_wait

TRUE = (0.02, 3e-4, 1e-7)


@pytest.fixture
def rng():
    seed = seed_of_run()
    print(f"seed {seed}")
    return random.Random(seed)


def work(rng: random.Random) -> tuple[float, float, float]:
    rows = rng.uniform(20, 900)
    return 1.0, rows, rows * rng.uniform(300, 2000)


def took(features) -> float:
    return sum(c * f for c, f in zip(TRUE, features, strict=True))


def line(rng: random.Random, times: int, noise: float) -> Line:
    found = Line((0.1, 0.8, 0.1))
    for _ in range(times):
        features = work(rng)
        found.add(features, took(features) * rng.lognormvariate(0.0, noise))
    return found


def error(found: Line, rng: random.Random) -> float:
    return statistics.mean(abs(found.seconds(f) / took(f) - 1.0) for f in (work(rng) for _ in range(50)))


def test_the_error_shrinks_with_observations(rng):
    few, many = (statistics.mean(error(line(rng, n, 0.3), rng) for _ in range(30)) for n in (READY, WINDOW))
    assert many < 0.6 * few
    assert many < 0.2


def test_without_noise_the_truth_is_found(rng):
    assert error(line(rng, 30, 0.0), rng) < 0.02


def test_one_wild_observation_changes_little(rng):
    found = line(rng, 20, 0.1)
    features = work(rng)
    before = found.seconds(features)
    for wild in (1e3, 1e-3):
        found.add(features, took(features) * wild)
        assert found.seconds(features) == pytest.approx(before, rel=0.25)


@pytest.mark.parametrize(("factor", "half_lives"), [(4.0, 2), (20.0, 4), (0.05, 4)])
def test_a_lasting_change_is_followed(rng, factor, half_lives):
    found = line(rng, WINDOW, 0.1)
    features = work(rng)
    for _ in range(int(half_lives * HALF_LIFE)):
        other = work(rng)
        found.add(other, factor * took(other) * rng.lognormvariate(0.0, 0.1))
    assert found.seconds(features) == pytest.approx(factor * took(features), rel=0.3)


@given(
    st.lists(
        st.tuples(st.integers(0, 10**12), st.integers(0, 10**6), st.floats(0, 100)), min_size=1, max_size=2 * WINDOW
    )
)
def test_no_rate_is_negative_or_undefined(observations):
    found = Line((0.5, 0.5))
    for *features, seconds in observations:
        found.add(features, seconds)
    assert found.count == len(observations)
    assert all(0.0 <= c < float("inf") for c in found.coefficients)


def test_one_size_of_work_is_split_by_the_shares():
    found = Line((0.25, 0.75))
    for _ in range(5):
        found.add((4.0, 100.0), 2.0)
    assert found.seconds((4.0, 100.0)) == pytest.approx(2.0, rel=0.05)
    assert found.seconds((0.0, 100.0)) == pytest.approx(1.5, rel=0.1)


def test_before_any_observation_nothing_is_known():
    book = RateBook()
    assert not book.ready
    assert book.knows("memory")
    assert not book.knows("disk")
    assert book.recompute.seconds((1, 2, 3)) == 0.0


def observation(**changes) -> Observation:
    stages = {"score": 0.1, "load": 0.5, "rotate": 0.02, "recompute": 0.3}
    usual = {
        "stages": stages, "recompute": Work(50, 5000), "layers": 10, "passes": 2,
        "selection": ("attention", Work(20, 2000)), "assembled": (20, 8000), "handed": (60, 1e6),
        "reads": {"disk": (30, 1e6, 0.4)}, "avoided": (),
    }  # fmt: skip
    return Observation(**{**usual, **changes})


def test_a_book_learns_every_stage():
    book = RateBook()
    for _ in range(READY):
        book.observe(observation())
    assert book.ready
    assert book.knows("disk")
    assert book.recompute.seconds(Work(50, 5000).features) == pytest.approx(0.3, rel=0.05)
    assert book.selecting("attention", Work(20, 2000), 10) == pytest.approx(0.1, rel=0.05)
    assert book.rotate.seconds((20, 8000)) == pytest.approx(0.02, rel=0.05)
    assert book.read["disk"].seconds((30, 1e6)) == pytest.approx(0.4, rel=0.05)
    assert book.hand.count == 0  # a wait for the disk says nothing of memory
    # 0.11 s were computed while 0.4 s were read: 0.04 + 0.29 x 0.9 s of waiting, of the 0.5 s seen.
    assert pipelined_wait(0.4, 0.11, 10) == pytest.approx(0.301)
    assert book.unhidden.seconds((0.4,)) == pytest.approx(0.5 - 0.301, rel=0.05)
    book.observe(observation(reads={}))
    assert book.hand.seconds((60, 1e6)) == pytest.approx(0.5, rel=0.05)


def test_a_pass_that_was_never_seen_costs_as_a_recompute_pass():
    book = RateBook()
    teach(book.recompute, (0.01, 1e-3, 1e-6), random.Random(0))
    whole = book.recompute.seconds(Work(100, 1000).features)
    assert book.selecting("attention", Work(100, 1000), 8) == pytest.approx(whole)
    assert book.selecting("deviation", Work(100, 1000), 8) == pytest.approx(whole / 4)


def test_tiers_left_alone_are_counted_until_they_are_read():
    book = RateBook()
    book.observe(observation(reads={}, avoided=("disk",)))
    book.observe(observation(reads={}, avoided=("disk", "remote")))
    assert book.avoided == {"disk": 2, "remote": 1}
    book.observe(observation())
    assert book.avoided == {"disk": 0, "remote": 1}
