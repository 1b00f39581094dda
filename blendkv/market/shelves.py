"""Worth in steps, for rules whose order changes with the time between blocks of different worth, but not of the same.

What is on one shelf keeps its order, so that the next victim is the first of some shelf, and there are few shelves.
"""

from __future__ import annotations

import math

STEPS = 8
"""Shelves per octave: what is within 4.5 % of 2^(i / 8) counts as that."""
WORTHLESS = -(1 << 20)
"""The shelf of what is worth nothing."""


def shelf_of(worth: float) -> int:
    """The shelf for a worth of 0 or more."""
    return round(STEPS * math.log2(worth)) if worth > 0 else WORTHLESS


def worth_of(shelf: int) -> float:
    """What everything on a shelf counts for."""
    return 0.0 if shelf == WORTHLESS else 2.0 ** (shelf / STEPS)
