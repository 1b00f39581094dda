"""Any sequence of calls by two clients, compared with a dict."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from remote_chunks import Opener, StoredChunk, chunk, read_all

KEYS = [f"{number:064x}" for number in range(4)]


PLACES = [("file", "?zstd=1"), ("memory", ""), ("redis", "?zstd=1"), ("s3", ""), ("az", "")]


@pytest.mark.parametrize(("kind", "options"), PLACES)
def test_like_a_dict(kind: str, options: str, url_of: Callable[[str], str], opened: Opener) -> None:
    url, runs = url_of(kind) + options, iter(range(1 << 30))

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            namespace = f"machine{next(runs)}"  # every run begins with nothing
            self.tiers = [opened(url, namespace=namespace) for _ in range(2)]
            self.truth: dict[str, StoredChunk] = {}

        @rule(who=st.integers(0, 1), key=st.sampled_from(KEYS), seed=st.integers(0, 9), layers=st.integers(1, 4))
        def put(self, who: int, key: str, seed: int, layers: int) -> None:
            one = chunk(random.Random(seed), layers=layers, size=50 * seed, key=key)
            assert one.put(self.tiers[who]) == (key not in self.truth)
            self.truth.setdefault(key, one)

        @rule(who=st.integers(0, 1), key=st.sampled_from(KEYS))
        def delete(self, who: int, key: str) -> None:
            assert self.tiers[who].delete(key) == (self.truth.pop(key, None) is not None)

        @rule(who=st.integers(0, 1), key=st.sampled_from(KEYS), step=st.integers(1, 3))
        def read(self, who: int, key: str, step: int) -> None:
            assert read_all(self.tiers[who], key, step) == self.truth.get(key)

        @rule(who=st.integers(0, 1), keys=st.lists(st.sampled_from(KEYS), max_size=6))
        def look_up(self, who: int, keys: list[str]) -> None:
            assert self.tiers[who].contains(keys) == set(keys) & self.truth.keys()

        @invariant()
        def listed(self) -> None:
            assert set(self.tiers[0].keys()) == self.truth.keys()

        def teardown(self) -> None:
            for tier in self.tiers:
                tier.close()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=8, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
