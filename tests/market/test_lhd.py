"""LHD: hit densities by hand, what it learns, and how ages are coarsened."""

from __future__ import annotations

import math

import numpy as np
import pytest

from blendkv.market.base import NOBODY, POLICIES, Item
from blendkv.market.density import AGES, CLASSES, FIRST_FIT, Densities, LhdPolicy

ALL = 10**9


def add(policy: LhdPolicy, key: str, nbytes: int = 10) -> None:
    policy.added(key, Item(nbytes, 1.0), NOBODY, 0.0)


def test_densities_by_hand() -> None:
    densities = Densities()
    densities.hits[0, 1] = 3.0
    densities.evictions[0, 3] = 1.0
    densities.fit(1)
    # At age 0: 3 hits in 3 x 2 + 1 x 4 = 10 ages; at age 1: 3 in 3 x 1 + 1 x 3 = 6; then none.
    assert densities.by_class[0][:5] == pytest.approx([0.3, 0.5, 0.0, 0.0, 0.0])
    assert densities.by_class[0][-1] == -1.0
    assert densities.by_class[5] == densities.by_class[0]  # nothing is known of it: as all together


def test_classes_have_densities_of_their_own_and_evidence_fades() -> None:
    densities = Densities()
    densities.hits[1, 0] = 1.0  # 1 hit in 1 age
    densities.evictions[2, 0] = 1.0  # no hit
    densities.fit(1)
    assert densities.by_class[1][0] == 1.0
    assert densities.by_class[2][0] == 0.0
    assert densities.by_class[0][0] == 0.5  # both classes: 1 hit in 2 ages
    assert densities.hits[1, 0] == densities.evictions[2, 0] == 0.9
    densities.hits[2, 0] += 1.0  # 1 hit now counts more than 0.9 evictions then
    densities.fit(1)
    assert densities.by_class[2][0] == pytest.approx(1 / 1.9)


def test_ages_are_coarsened_to_the_blocks_held() -> None:
    densities = Densities()
    densities.hits[3, 80] = 8.0
    densities.evictions[3, 4000] = 2.0
    assert densities.age(80) == 80
    densities.fit(512)  # 512 / 64 = 8 uses an age
    assert densities.shift == 3
    assert densities.age(80) == 10
    assert densities.hits[3, 10] == pytest.approx(0.9 * 8)
    assert densities.evictions[3, 500] == pytest.approx(0.9 * 2)
    assert densities.age(10**9) == AGES - 1
    while densities.shift > 0:
        densities.fit(1)
    total = densities.hits.sum()
    assert np.flatnonzero(densities.hits[3]).tolist() == list(range(80, 88))  # spread over the ages it stood for
    assert np.allclose(densities.hits[3, 80:88], total / 8)
    assert densities.evictions.sum() == pytest.approx(total / 4)


def test_counts_beyond_the_last_age_are_kept_there() -> None:
    densities = Densities()
    densities.fit(512)
    densities.hits[0, AGES - 2] = 1.0
    densities.fit(1)
    while densities.shift > 0:
        densities.fit(1)
    assert densities.hits[0, AGES - 1] == pytest.approx(densities.hits.sum()) != 0.0


def test_the_first_victims_by_hand() -> None:
    """Before anything is learned a density is 1 / (age + 1), and it counts per byte."""
    policy = LhdPolicy(1000)
    add(policy, "a", 10)  # age 2: 1/3 over 10 bytes, 0.033
    add(policy, "b", 30)  # age 1: 1/2 over 30 bytes, 0.017
    add(policy, "c", 20)  # age 0: 1 over 20 bytes, 0.05
    assert policy.victims(ALL, (), 0.0) == ["b", "a", "c"]
    assert policy.victims(30, {"b"}, 0.0) == ["a", "c"]
    policy.touched("a", NOBODY, 0.0)  # ages: a 0 (0.1), b 2 (0.011), c 1 (0.025)
    assert policy.victims(ALL, (), 0.0) == ["b", "c", "a"]
    policy.added("b", Item(1, 1.0), NOBODY, 0.0)  # b 0 (1), c 2 (0.017), a 1 (0.05)
    assert policy.victims(ALL, (), 0.0) == ["c", "a", "b"]


def test_events_are_counted_by_class_and_age() -> None:
    policy = LhdPolicy(1000)
    for key in "abc":
        add(policy, key)
    policy.touched("a", NOBODY, 0.0)  # hit at age 3, in the class of those without a hit
    policy.touched("b", NOBODY, 0.0)  # the same
    policy.touched("a", NOBODY, 0.0)  # hit at age 2, in the class of 2..3: 1 + 2 bits
    assert policy._densities.hits[0, 3] == 2.0
    assert policy._densities.hits[3, 2] == 1.0
    assert policy.victims(10, (), 0.0) == ["c"]
    policy.removed("b", 0.0)  # deleted: no eviction
    assert policy._densities.evictions.sum() == 0.0
    policy.removed("c", 0.0)
    assert policy._densities.evictions[0, 3] == 1.0
    assert policy._densities.hits.sum() == 3.0


def test_it_learns_what_recency_cannot_see() -> None:
    """5 blocks come back every 40 uses, 35 others never: after the first fit the younger ones leave before them."""
    policy = LhdPolicy(10**6)
    held: list[str] = []
    for number in range(FIRST_FIT + 80):
        turn = number % 40
        if turn < 5:
            key = f"loop-{turn}"
            if number < 40:
                add(policy, key)
            else:
                policy.touched(key, NOBODY, 0.0)
            continue
        add(policy, f"scan-{number}")
        held.append(f"scan-{number}")
        if len(held) > 45:
            gone = held.pop(0)
            policy.victims(10, {key for key in policy._blocks if key != gone}, 0.0)
            policy.removed(gone, 0.0)
    age = policy._uses - policy._blocks["loop-0"].used
    assert age >= 35  # older than most of what was scanned
    order = policy.victims(ALL, (), 0.0)
    assert len(order) == 50
    assert set(order[-5:]) == {f"loop-{turn}" for turn in range(5)}


def test_victims_are_drawn_by_the_seed() -> None:
    def chosen(seed: int) -> list[str]:
        policy = LhdPolicy(10**6, seed)
        for number in range(1000):
            add(policy, str(number))
        return policy.victims(100, (), 0.0)

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)
    ages = [1000 - int(key) for key in chosen(3)]
    assert min(ages) > 500  # the lowest of 64 draws: far older than the median


def test_equal_densities_leave_by_age() -> None:
    """Nothing of 40 blocks or of 400 was ever used again, so that after the fit all have a density of 0."""
    for count in (40, 400):
        policy = LhdPolicy(10**6)
        for number in range(2 * FIRST_FIT):
            add(policy, f"{number:04}")
            if number >= count:
                gone = f"{number - count:04}"
                policy.victims(10, policy._blocks.keys() - {gone}, 0.0)
                policy.removed(gone, 0.0)
        order = policy.victims(ALL, (), 0.0)
        assert len(order) == count
        assert policy._densities.by_class[0][:count] == [0.0] * count
        if count == 40:
            assert order == sorted(order)
        else:
            assert order[0] < f"{2 * FIRST_FIT - count // 2:04}"  # the oldest of 64 drawn


def test_each_eviction_draws_anew() -> None:
    """Evictions in a row, with no use between them: a request's blocks are made room for one by one."""
    policy = LhdPolicy(10**6)
    for number in range(900):
        add(policy, f"{number:03}")
    gone: list[int] = []
    for _ in range(200):
        (key,) = policy.victims(10, (), 0.0)
        policy.removed(key, 0.0)
        gone.append(int(key))
    assert sum(gone) / 200 < 110  # about 100; where draws repeat, 119 to 157


def test_draws_count_per_byte() -> None:
    policy = LhdPolicy(10**6)
    for number in range(400):
        add(policy, f"{number:03}", nbytes=10_000 if number % 4 == 3 else 1)
    assert all(int(key) % 4 == 3 for key in policy.victims(200_000, (), 0.0))


def test_a_fit_without_evidence_changes_nothing() -> None:
    densities = Densities()
    densities.fit(100)
    assert densities.by_class == Densities().by_class


def test_drawing_finds_the_few_that_may_leave() -> None:
    policy = LhdPolicy(10**6)
    for number in range(1000):
        add(policy, str(number))
    keep = {str(number) for number in range(999)}
    assert policy.victims(10, keep, 0.0) == ["999"]
    assert policy.victims(20, keep, 0.0) == ["999"]


def test_the_initial_densities_fall_with_age() -> None:
    densities = Densities()
    assert len(densities.by_class) == CLASSES
    assert all(math.isclose(density, 1 / (age + 1)) for age, density in enumerate(densities.by_class[0]))


def test_names() -> None:
    assert POLICIES.get("lhd") is LhdPolicy
