"""Whose work this is: the workload class and session of what runs now, for the store's tiers to see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from blendkv.market.base import NOBODY, Use

_current: ContextVar[Use] = ContextVar("blendkv_use", default=NOBODY)


def current_use() -> Use:
    """Who uses what is looked up or stored now; nobody in particular by default."""
    return _current.get()


@contextmanager
def using(use: Use) -> Iterator[None]:
    """What happens in this block, on this thread or task, is for ``use``."""
    token = _current.set(use)
    try:
        yield
    finally:
        _current.reset(token)
