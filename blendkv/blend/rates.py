"""What the stages of a blend cost on this machine, learned from what they took."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

WINDOW = 48
"""Observations that a line is fitted to."""
HALF_LIFE = 12.0
"""After how many further observations one counts half."""
READY = 3
"""Observations of a line before anything is decided by it."""
CLIP = 5.0
"""How far from its prediction an observation is believed to be, as a factor."""
RETRY = 16
"""Plans in a row that left a tier alone, before one loads a chunk from it to learn whether it is still slow."""

_ROUNDS = 12
_SHARP = 0.01  # deviations below this weigh as this, which bounds the weights of the re-weighted fit
_PRIOR = 0.02  # weight of the assumption that settles what the observations leave open
_SHORTEST = 1e-7  # seconds


class Line:
    """seconds = coefficients . features, no coefficient below 0, fitted to the latest observations.

    The fit minimises the weighted sum of |seconds - predicted| / size of the work (least absolute deviations, by
    iteratively re-weighted non-negative least squares), an observation's weight halving with every `HALF_LIFE` later
    ones; and a value beyond `CLIP` times what was predicted, or below that part of it, counts as that. So one wild
    value moves it little, however wild and whatever its features, and a lasting change is followed once it makes up
    half of the weight. The size of the work is the sum of its features, each relative to the largest seen, weighted by
    ``shares``; where observations do not tell two features apart, the time of a typical one is split likewise.

    Parameters
    ----------
    shares
        One per feature, at least 0, their sum 1.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = np.asarray(shares, dtype=np.float64)
        self._seen: deque[tuple[Floats, float]] = deque(maxlen=WINDOW)
        self._fitted: Floats | None = None
        self.count = 0
        """Observations so far."""

    def add(self, features: Sequence[float], seconds: float) -> None:
        """Note that work with these features, each at least 0, took ``seconds``."""
        if self.count >= READY and (expected := self.seconds(features)) > 0.0:
            seconds = min(max(seconds, expected / CLIP), expected * CLIP)
        self._seen.append((np.asarray(features, dtype=np.float64), max(seconds, _SHORTEST)))
        self._fitted = None
        self.count += 1

    @property
    def coefficients(self) -> Floats:
        """Seconds per unit of each feature, ``[features]``; zeros before the first observation."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def seconds(self, features: Sequence[float] | Floats) -> float:
        """Seconds predicted for ``features``."""
        return float(np.dot(self.coefficients, np.asarray(features, dtype=np.float64)))

    def _fit(self) -> Floats:
        if not self._seen:
            return np.zeros_like(self._shares)
        from scipy.optimize import nnls

        features = np.stack([f for f, _ in self._seen])
        seconds = np.array([s for _, s in self._seen])
        largest = features.max(0)
        scaled = features / np.where(largest == 0.0, 1.0, largest)
        size = scaled @ self._shares
        size = np.where(size == 0.0, 1.0, size)
        unit = float(np.median(seconds / size))
        rows, wanted = scaled / size[:, None], seconds / size / unit
        prior, pull = np.diag(np.median(rows, axis=0)), np.sqrt(_PRIOR)
        weights = 0.5 ** (np.arange(len(seconds))[::-1] / HALF_LIFE)
        # Begins at what the size alone would say, so that a wild value is one from the start.
        found, deviation = np.zeros_like(largest), np.abs(wanted - 1.0) + 0.1
        for _ in range(_ROUNDS):
            root = np.sqrt(weights / np.maximum(deviation, _SHARP))
            found = nnls(
                np.concatenate((rows * root[:, None], prior * pull)),
                np.concatenate((wanted * root, self._shares * pull)),
            )[0]
            deviation = np.abs(wanted - rows @ found)
        return found * unit / np.where(largest == 0.0, 1.0, largest)


@dataclass(frozen=True)
class Work:
    """Rows that a pass runs through the model, and the (row, key) pairs that their attention looks at."""

    rows: float
    pairs: float

    @property
    def features(self) -> tuple[float, float, float]:
        """Of a `Line` over passes."""
        return 1.0, self.rows, self.pairs


@dataclass(frozen=True)
class Observation:
    """What one blend did, and the seconds it took.

    Attributes
    ----------
    stages
        Seconds of ``score``, ``load``, ``rotate`` and ``recompute``, as `blendkv.blend.BlendSummary` has them.
    recompute
        Work of the recompute pass.
    layers, passes
        Layers of the model, and passes over the stored KV: 2 if the question was run over it first, else 1.
    selection
        Kind (``attention`` or ``deviation``) and work of the pass that selects; None if there was none.
    assembled
        (calls, tokens): layers put together, and stored tokens moved, summed over passes and layers.
    handed
        (calls, bytes): chunk layers, and their bytes, that the blend took from its source, summed over passes.
    reads
        By tier other than memory: (chunk layers, bytes) read from it, and seconds of reading.
    avoided
        Tiers that held chunks of which none was loaded, by choice.
    """

    stages: Mapping[str, float]
    recompute: Work
    layers: int
    passes: int
    selection: tuple[str, Work] | None
    assembled: tuple[float, float]
    handed: tuple[float, float]
    reads: Mapping[str, tuple[float, float, float]]
    avoided: Sequence[str] = ()

    @property
    def overlapped(self) -> float:
        """Seconds computed while layers were read: the first pass."""
        rotate = self.stages["rotate"] / self.passes
        return self.stages["score"] + rotate + (self.stages["recompute"] if self.passes == 1 else 0.0)


def pipelined_wait(read: float, computed: float, layers: int) -> float:
    """Seconds waited for reading if each layer is read while the one before it is computed.

    The first layer is waited for in full, the others for what computing does not hide:
    R / L + max(0, R - C) (L - 1) / L.
    """
    return read / layers + max(0.0, read - computed) * (layers - 1) / layers


class RateBook:
    """The rates of one model on one machine, kept current by what blends really took. Safe to use from threads.

    Each is a `Line`:

    ========================  ==============================================================
    ``recompute``             passes, rows, pairs (row, key) of the recompute pass
    ``selection``, by kind    passes, rows, pairs of the pass that selects
    ``rotate``                layers put together, stored tokens moved
    ``hand``                  chunk layers, bytes that come from memory to the model's device
    ``read``, by tier         chunk layers, bytes read
    ``unhidden``              seconds of reading, of which a share is waited for beyond `pipelined_wait`
    ========================  ==============================================================
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.recompute = Line((0.1, 0.8, 0.1))
        self.selection: defaultdict[str, Line] = defaultdict(lambda: Line((0.1, 0.8, 0.1)))
        self.rotate = Line((0.2, 0.8))
        self.hand = Line((0.5, 0.5))
        self.read: defaultdict[str, Line] = defaultdict(lambda: Line((0.1, 0.9)))
        self.unhidden = Line((1.0,))
        self.avoided: defaultdict[str, int] = defaultdict(int)
        """By tier: plans in a row that left it alone by choice."""

    @property
    def ready(self) -> bool:
        """Whether enough blends were seen to decide by their rates."""
        return self.recompute.count >= READY

    def knows(self, tier: str) -> bool:
        """Whether enough reads of a tier were seen to decide by its rate; memory needs none."""
        return tier == "memory" or (tier in self.read and self.read[tier].count >= READY)

    def observe(self, seen: Observation) -> None:
        """Learn from a blend."""
        with self.lock:
            self.recompute.add(seen.recompute.features, seen.stages["recompute"])
            if seen.selection is not None:
                kind, work = seen.selection
                self.selection[kind].add(work.features, seen.stages["score"])
            if seen.assembled[0] > 0:
                self.rotate.add(seen.assembled, seen.stages["rotate"])
            if seen.handed[0] > 0 and not seen.reads:  # else the stage is mostly a wait for a tier
                self.hand.add(seen.handed, seen.stages["load"])
            read = sum(seconds for _, _, seconds in seen.reads.values())
            if read > 0.0:
                known = self.hand.seconds(seen.handed) + pipelined_wait(read, seen.overlapped, seen.layers)
                self.unhidden.add((read,), seen.stages["load"] - known)
            for tier, (calls, size, seconds) in seen.reads.items():
                self.read[tier].add((calls, size), seconds)
                self.avoided[tier] = 0
            for tier in seen.avoided:
                self.avoided[tier] += 1

    def selecting(self, kind: str, work: Work, layers: int) -> float:
        """Seconds of a pass that selects; before the first one, as a recompute pass of that work would take.

        A deviation pass ends at the check layer, the second of ``layers``.
        """
        if kind in self.selection:
            return self.selection[kind].seconds(work.features)
        share = min(1.0, 2 / layers) if kind == "deviation" else 1.0
        return share * self.recompute.seconds(work.features)
