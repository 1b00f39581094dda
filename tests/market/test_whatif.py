"""What more bytes would have saved: by hand, and against a replay with those bytes."""

from __future__ import annotations

from random import Random

import pytest

from blendkv.market.base import Item, Use
from blendkv.market.policy import MarketPolicy
from blendkv.market.whatif import WhatIf


def test_by_hand() -> None:
    ghosts = WhatIf()
    mark = ghosts.leaves(1000)
    ghosts.leaves(24)
    ghosts.returned(mark, 2.0)  # 1,024 bytes more would have kept it
    assert ghosts.more(1023) == ghosts.more(1024) == 0.0  # the octave from 1,024 on has it, evenly
    assert ghosts.more(1536) == pytest.approx(1.0)
    assert ghosts.more(2048) == pytest.approx(2.0)
    assert ghosts.more(0) == ghosts.more(-5) == 0.0


@pytest.mark.parametrize("more", [20, 60])
def test_it_foretells_what_a_larger_tier_saves(more: int) -> None:
    """Blocks by Zipf's law, with room for 20, and with room for as many more as is asked."""
    seconds = {}
    for room in (20, 20 + more):
        random, policy, held, saved = Random(9), MarketPolicy(room * 1000), set(), 0.0
        for step in range(8000):
            key, use, now = f"k{int(random.paretovariate(0.6)) % 1000}", Use("rag", f"s{step}"), step * 0.1
            if key in held:
                policy.touched(key, use, now)
                saved += 1.0
                continue
            leaving = policy.victims(1000, (), now) if len(held) == room else []
            if policy.admits(key, Item(1000, 1.0), use, leaving, now):
                for gone in leaving:
                    policy.removed(gone, now)
                    held.remove(gone)
                policy.added(key, Item(1000, 1.0), use, now)
                held.add(key)
        seconds[room] = saved, policy.more(more * 1000)
    gain = seconds[20 + more][0] - seconds[20][0]
    print(f"gain {gain}, foretold {seconds[20][1]}")
    assert gain > 300
    assert 0.5 * gain <= seconds[20][1] <= 2.0 * gain
