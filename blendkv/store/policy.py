"""The eviction policies of a store's tiers, by the name that both have."""

from __future__ import annotations

import sys

from blendkv.market.base import EvictionPolicy
from blendkv.market.classic import LruPolicy
from blendkv.market.policies import POLICIES
from blendkv.market.policy import MarketPolicy


def tier_policy(name: str, limit: int | None) -> EvictionPolicy:
    """The policy called ``name`` for a tier of ``limit`` bytes; None: no limit.

    Raises
    ------
    InputError
        If there is none of that name.
    """
    return POLICIES.get(name)(sys.maxsize if limit is None else limit)


def disk_policy(name: str, limit: int | None) -> EvictionPolicy | None:
    """The policy of a disk tier; None for ``lru``, whose order the index has, and ``market``, which the memory's knows.

    Raises
    ------
    InputError
        If there is none of that name.
    """
    return None if POLICIES.get(name) in (LruPolicy, MarketPolicy) else tier_policy(name, limit)
