"""What sessions say of themselves, for policies that have the call for it."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

Hint = Literal["tool_started", "tool_finished", "session_ended"]


@runtime_checkable
class Hinted(Protocol):
    """A policy that listens to what sessions say of themselves."""

    def hint(self, session: str, what: Hint, ttl: float, now: float) -> None:
        """A session waits for a tool for ``ttl`` seconds at most, has its result, or is over (``ttl`` is 0 then)."""
