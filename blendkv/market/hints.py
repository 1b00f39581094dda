"""What a policy may be told beyond uses, if it has the calls for it; both are optional."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from blendkv.market.base import Item, Use

Hint = Literal["tool_started", "tool_finished", "session_ended"]


@runtime_checkable
class Hinted(Protocol):
    """A policy that listens to what sessions say of themselves."""

    def hint(self, session: str, what: Hint, ttl: float, now: float) -> None:
        """A session waits for a tool for ``ttl`` seconds at most, has its result, or is over (``ttl`` is 0 then)."""


@runtime_checkable
class Watching(Protocol):
    """A policy that learns from what is asked for and not held."""

    def missed(self, key: str, item: Item, use: Use, now: float) -> None:
        """``key`` was asked for and is not held; told in prompt order, before anything is stored for the request."""
