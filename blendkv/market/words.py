"""Classes, sessions and hints as callers give them: words of a bounded length, checked where they come in."""

from __future__ import annotations

import re
from typing import cast, get_args

from blendkv.errors import InputError
from blendkv.market.base import UNKNOWN, Use
from blendkv.market.context import current_use
from blendkv.market.hints import Hint

LONGEST_TTL = 86_400.0
"""Seconds that a tool may take at most, as a hint says."""
_WORD = re.compile(r"[\w.:@/+-]{1,64}", re.ASCII)


def check_word(name: str, given: object) -> str:
    """``given``, if it can be a class or a session.

    Raises
    ------
    InputError
        If it is no string of 1 to 64 letters, digits and ``_.:@/+-``.
    """
    if not isinstance(given, str) or not _WORD.fullmatch(given):
        raise InputError(f"{name} is {given!r:.80}; 1 to 64 letters, digits and _.:@/+- are allowed")
    return given


def use_of(workload: str | None, session: str | None, usual: str) -> Use:
    """Whose work this is: what is given, else what is current (`current_use`), else the class ``usual``.

    Raises
    ------
    InputError
        If a word that is given cannot be one.
    """
    now = current_use()
    named = usual if now.workload == UNKNOWN else now.workload
    return Use(
        named if workload is None else check_word("workload", workload),
        now.session if session is None else check_word("session", session),
    )


def check_hint(session: object, what: object, ttl: object) -> Hint:
    """Refuse a hint that makes no sense, and return what it says.

    Raises
    ------
    InputError
        If the session is no word, ``what`` is unknown, or ``ttl`` is not for it.
    """
    check_word("session", session)
    said = next((known for known in get_args(Hint) if known == what), None)
    if said is None:
        raise InputError(f"what is {what!r:.80}; allowed: {', '.join(get_args(Hint))}")
    number = isinstance(ttl, int | float) and not isinstance(ttl, bool)
    if what != "tool_started":
        if ttl != 0 or not number:
            raise InputError(f"ttl is {ttl!r:.80}; only tool_started takes one: leave it out")
    elif not number or not 0.0 < ttl <= LONGEST_TTL:  # type: ignore[operator]
        raise InputError(f"ttl is {ttl!r:.80}; for tool_started give seconds above 0, {LONGEST_TTL:.0f} at most")
    return cast(Hint, said)
