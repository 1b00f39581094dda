"""Eviction policies by name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container

from blendkv.registry import Registry
from blendkv.store.base import EvictionPolicy

POLICIES: Registry[Callable[[], EvictionPolicy]] = Registry("eviction policy")


class LruPolicy:
    """Least recently used goes first."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def added(self, key: str, nbytes: int) -> None:
        """Put ``key`` at the young end."""
        self._sizes[key] = nbytes
        self._sizes.move_to_end(key)

    def touched(self, key: str) -> None:
        """Move ``key`` to the young end."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def removed(self, key: str) -> None:
        """Forget ``key``."""
        self._sizes.pop(key, None)

    def victims(self, nbytes: int, keep: Container[str]) -> list[str]:
        """The oldest keys outside ``keep`` until ``nbytes`` bytes are freed."""
        chosen: list[str] = []
        freed = 0
        for key, size in self._sizes.items():
            if freed >= nbytes:
                break
            if key not in keep:
                chosen.append(key)
                freed += size
        return chosen


POLICIES.add("lru")(LruPolicy)


def disk_policy(name: str) -> EvictionPolicy | None:
    """The policy of a disk tier; None for ``lru``, whose order the index has."""
    make = POLICIES.get(name)
    return None if make is LruPolicy else make()
