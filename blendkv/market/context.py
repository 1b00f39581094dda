"""Whose work this is: the workload class and session of what runs now, for the store's tiers to see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from blendkv.errors import InputError
from blendkv.market.base import LONGEST_WORD, NOBODY, Use

_current: ContextVar[Use] = ContextVar("blendkv_use", default=NOBODY)


def current_use() -> Use:
    """Who uses what is looked up or stored now; nobody in particular by default."""
    return _current.get()


@contextmanager
def using(use: Use) -> Iterator[None]:
    """What happens in this block, on this thread or task, is for ``use``.

    Raises
    ------
    InputError
        If its class is not of 1 to 64 printable characters, or its session's id has more.
    """
    for name, word, least in (("workload", use.workload, 1), ("session", use.session, 0)):
        if not least <= len(word) <= LONGEST_WORD or not word.isprintable():
            raise InputError(f"{name} is {word!r:.80}; {least} to {LONGEST_WORD} printable characters are allowed")
    token = _current.set(use)
    try:
        yield
    finally:
        _current.reset(token)
