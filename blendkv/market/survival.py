"""How long until a block is used again: hazards by age, learned online, and the rate at which holding it pays.

Ages lie in bins of growing width. A group of blocks that behave alike counts, per bin, how many blocks came to that age
unused and how many of them were used before they left it: a life table (Kaplan and Meier 1958), which is not biased by
blocks that are still waiting. Blocks that were evicted are watched on, as ghosts.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blendkv.errors import InputError

Floats = npt.NDArray[np.float64]

FIRST_EDGE = 0.25
"""Seconds at which the first bin of ages ends."""
GROWTH = 2.0
BINS = 21
EDGES: tuple[float, ...] = (0.0, *(FIRST_EDGE * GROWTH**step for step in range(BINS - 1)))
"""Seconds at which each bin begins; the last one has no end. The one before it ends after about 36 hours."""
WIDTHS: Floats = np.diff(np.array([*EDGES, EDGES[-1] * GROWTH]))


def bin_of(age: float) -> int:
    """The bin in which an age of ``age`` seconds lies."""
    return max(0, bisect_right(EDGES, age) - 1)


@dataclass(frozen=True)
class Prior:
    """What is believed of a group before anything is seen.

    Attributes
    ----------
    reuse
        Probability that a block is used again at all.
    gap
        Median seconds until then.
    spread
        Standard deviation of the logarithm of those seconds (log-normal gaps).
    """

    reuse: float
    gap: float
    spread: float = 1.2

    def __post_init__(self) -> None:
        if not 0.0 <= self.reuse < 1.0:
            raise InputError(f"probability of reuse is {self.reuse}; 0 to below 1 is allowed")
        if self.gap <= 0.0 or self.spread <= 0.0:
            raise InputError(f"gap {self.gap} s with spread {self.spread}; both must be above 0")

    def hazards(self) -> Floats:
        """Probability, per bin, that a block which came to the bin unused is used in it."""
        from math import erf, log, sqrt

        ends = [*EDGES[1:], EDGES[-1] * GROWTH]
        upto = [0.0, *(0.5 * (1.0 + erf(log(end / self.gap) / (self.spread * sqrt(2.0)))) for end in ends)]
        used = self.reuse * np.diff(upto)
        left = 1.0 - self.reuse * np.array(upto[:-1])
        return np.clip(used / left, 0.0, 0.999)


def steady_hazards(interval: float) -> Floats:
    """Hazards of a block that is used at random, every ``interval`` seconds in the mean."""
    return np.minimum(1.0 - np.exp(-WIDTHS / interval), 0.999)


def holding_rates(hazards: Floats) -> tuple[Floats, Floats]:
    """What holding a block of each age yields, in expected uses per second, and the horizon that yields it.

    The Gittins index of the choice "hold for T seconds more unless it is used before": the largest over T of P(used
    within T) / E[seconds held]. It ranks blocks rightly whatever the form of the hazard (Gittins 1979; hit density in
    LHD, Beckmann et al. 2018, is the same with T left at infinity).

    Parameters
    ----------
    hazards
        ``[groups, BINS]``.

    Returns
    -------
    rates, horizons
        ``[groups, BINS]``: uses per second, and seconds from the begin of the bin.
    """
    rates, horizons = np.empty_like(hazards), np.empty_like(hazards)
    for start in range(BINS):
        tail = hazards[:, start:]
        # From this age on, anew for each: differences of sums from age 0 would cancel where few blocks are left.
        reach = np.cumprod(np.concatenate([np.ones((len(tail), 1)), 1.0 - tail[:, :-1]], axis=1), axis=1)
        used = np.cumsum(reach * tail, axis=1)
        held = np.cumsum(reach * WIDTHS[start:] * (1.0 - tail / 2), axis=1)
        ratio = used / held
        best = ratio.argmax(axis=1)[:, None]
        rates[:, start] = np.take_along_axis(ratio, best, axis=1)[:, 0]
        horizons[:, start] = np.cumsum(WIDTHS[start:])[best[:, 0]]
    return rates, horizons


class LifeTable:
    """Counts of one group; ``entered[b]`` blocks came to bin b unused, ``used[b]`` of them were used in it."""

    __slots__ = ("entered", "used")

    def __init__(self) -> None:
        self.entered = [0.0] * BINS
        self.used = [0.0] * BINS

    def fade(self, factor: float) -> None:
        """Let what was seen count for less."""
        self.entered = [count * factor for count in self.entered]
        self.used = [count * factor for count in self.used]
