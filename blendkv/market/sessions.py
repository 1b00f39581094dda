"""Sessions: what ties the turns of one conversation together, which blocks they use, and what they wait for."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum

MOST_SESSIONS = 1 << 16
"""Sessions that are remembered; the one that was quiet for the longest time is forgotten first."""


class State(Enum):
    """What a session has said of itself."""

    ENDED = "ended"
    """It will not come back."""


class _Session:
    __slots__ = ("keys", "last", "said", "state", "turns")

    def __init__(self) -> None:
        self.keys: dict[str, None] = {}
        self.last = float("-inf")
        self.state: State | float | None = None
        self.said: float | None = None
        self.turns = 0


class Sessions:
    """Sessions by id. The empty id is nobody's: its turns and blocks are not remembered."""

    def __init__(self, most: int = MOST_SESSIONS) -> None:
        self._known: OrderedDict[str, _Session] = OrderedDict()
        self._most = most

    def __len__(self) -> int:
        return len(self._known)

    def used(self, key: str, session: str, now: float) -> None:
        """The session uses a block; the first one at a time begins a new turn, and ends what it has said before."""
        if not session:
            return
        known = self._known.get(session)
        if known is None:
            known = self._known[session] = _Session()
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        if now > known.last:
            known.last, known.state = now, None
            known.turns += 1
            self._known.move_to_end(session)
        known.keys[key] = None

    def turns(self, session: str, now: float) -> int:
        """Turns so far, the one at ``now`` included."""
        known = self._known.get(session)
        return 1 if known is None else known.turns + (now > known.last)

    def say(self, session: str, state: State | float | None) -> bool:
        """Note that it has ended, is to come back within so many seconds, or neither; return whether it is known."""
        known = self._known.get(session)
        if known is not None:
            known.state = state
            if isinstance(state, float):
                known.said = state
        return known is not None

    def said(self, session: str) -> float | None:
        """Within how many seconds it was to come back when it last said so."""
        known = self._known.get(session)
        return None if known is None else known.said

    def state(self, session: str) -> State | float | None:
        """What it has said since its last turn."""
        known = self._known.get(session)
        return None if known is None else known.state

    def keys(self, session: str) -> list[str]:
        """The blocks that it has used."""
        known = self._known.get(session)
        return [] if known is None else list(known.keys)

    def forget(self, session: str, key: str) -> None:
        """A block of the session is not watched any more."""
        known = self._known.get(session)
        if known is not None:
            known.keys.pop(key, None)
