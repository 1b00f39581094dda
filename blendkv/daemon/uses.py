"""Whose work a request is, as far as its client says so."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager, nullcontext

from blendkv.daemon import messages as m
from blendkv.market.base import NOBODY, UNKNOWN, Use
from blendkv.market.classes import BUILT_IN
from blendkv.market.context import current_use, using

MOST_CLASSES = 64
"""Workload classes beside the built-in ones that a daemon tells apart."""
_NOTHING = nullcontext()
_log = logging.getLogger(__name__)


def words() -> tuple[str, str]:
    """Workload class and session of what runs now, as a message has them: empty for nobody."""
    use = current_use()
    return ("", "") if use is NOBODY else (use.workload, use.session)


def acting(use: Use) -> AbstractContextManager[None]:
    """`using`, that costs nothing for nobody."""
    return _NOTHING if use is NOBODY else using(use)


class Uses:
    """Makes uses of what clients say; nobody can make its tables grow.

    The first `MOST_CLASSES` classes that come are told apart, further ones are unknown and counted.
    """

    def __init__(self) -> None:
        self.strange = 0
        """Requests whose class was taken as unknown."""
        self._known = {known.name for known in BUILT_IN}
        self._room = MOST_CLASSES
        self._lock = threading.Lock()

    def of(self, request: m.Request) -> Use:
        """Whose work ``request`` is."""
        if not isinstance(request, m.Tagged) or not (request.workload or request.session):
            return NOBODY
        workload, session = request.workload or UNKNOWN, request.session
        if workload not in self._known and not self._learn(workload):
            workload = UNKNOWN
        return Use(workload, session if session.isprintable() else "")

    def _learn(self, workload: str) -> bool:
        with self._lock:
            if self._room and workload.isprintable():
                self._room -= workload not in self._known
                self._known.add(workload)
                return True
            if not self.strange:
                _log.warning("workload class %r: more than %d, or no word; it counts as unknown (said once)",
                             workload, MOST_CLASSES)  # fmt: skip
            self.strange += 1
            return False
