"""The loading controller: per request, which stored chunks to load and which to recompute whole, and at what budget.

After CacheBlend (arXiv 2405.16444), whose controller recomputes as much as hides behind loading; here it may also leave
a chunk unread. What it decides changes how long a blend takes, never whether it is right: a chunk that is not loaded is
computed with the whole prompt before it in sight, as in full prefill.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blendkv.blend.layout import Layout, Span
from blendkv.blend.rates import RETRY, Floats, RateBook, Work
from blendkv.blend.settings import BlendSettings

EXHAUSTIVE = 12
"""Up to so many contested chunks every combination is tried."""
MARGIN = 0.1
"""Share of the time that leaving chunks unread must save, by prediction, before it is done."""
HEADROOM = 0.9
"""Share of the predicted reading time that a raised budget fills."""
MAX_BUDGET = 0.3
"""The planner raises no budget above this."""


def work_of(spans: Sequence[Span]) -> Work:
    """Rows of some spans, and the pairs with all that stands before each row, itself included."""
    pairs = sum((s.stop * (s.stop + 1) - s.start * (s.start + 1)) // 2 for s in spans)
    return Work(sum(len(s) for s in spans), pairs)


@dataclass(frozen=True)
class StoredChunk:
    """A chunk KV that a prompt can use: at all its places, because it is read once for all of them.

    ``tier`` is where its ``nbytes`` bytes are; those in memory are not read.
    """

    spans: tuple[Span, ...]
    tier: str
    nbytes: int

    @property
    def tokens(self) -> int:
        """Tokens at all its places."""
        return sum(len(s) for s in self.spans)

    @property
    def candidate(self) -> bool:
        """Whether it has tokens that may be selected."""
        return any(not s.exact for s in self.spans)


@dataclass(frozen=True)
class LoadingRequest:
    """What the planner knows of a blend: its layout, where its chunks are, the model's layers, the settings."""

    layout: Layout
    chunks: tuple[StoredChunk, ...]
    layers: int
    settings: BlendSettings

    @property
    def fresh(self) -> Work:
        """What is computed whatever is decided: the question, and chunks without stored KV."""
        return work_of([s for s in self.layout.spans if not s.stored])


@dataclass(frozen=True)
class LoadPlan:
    """What was decided for one blend.

    Attributes
    ----------
    recompute
        Segments of the blended prompt that have stored KV and are computed whole by choice, ascending.
    budget_asked, budget
        The budget of the settings, and the one to blend with.
    predicted
        Seconds of ``load`` (the wait for stored KV), ``score``, ``rotate`` and ``recompute``, as the stages of
        `blendkv.blend.BlendSummary`; their sum ``total``; and ``read``: reading, hidden behind the rest or not. None
        until enough blends were seen.
    retried
        Tiers from which a chunk is loaded although that looks slower, because the last plans all left them alone.
    """

    recompute: tuple[int, ...]
    budget_asked: float
    budget: float
    predicted: Mapping[str, float] | None
    retried: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Cost:
    """Predicted seconds of one choice. ``first`` is computed while layers are read."""

    read: float
    hand: float
    unhidden: float
    score: float
    rotate: float
    recompute: float
    first: float
    layers: int

    @property
    def bounds(self) -> tuple[float, float]:
        """Seconds if computing hides reading, and if reading hides computing; the total is the larger one.

        Their maximum is what `pipelined_wait` says, and what was seen to be waited for beyond that.
        """
        everything = self.score + self.rotate + self.recompute + self.hand + self.unhidden
        hidden = everything + self.read / self.layers
        return hidden, hidden + (self.read - self.first) * (self.layers - 1) / self.layers

    @property
    def seconds(self) -> dict[str, float]:
        """`LoadPlan.predicted`."""
        total = max(self.bounds)
        compute = self.score + self.rotate + self.recompute
        return {
            "load": total - compute, "score": self.score, "rotate": self.rotate, "recompute": self.recompute,
            "total": total, "read": self.read,
        }  # fmt: skip


class LoadingPlanner:
    """Decides by the rates of ``book``; the same request and book give the same plan.

    Among all choices of chunks to load it takes one whose predicted total is least (`least`), if that saves `MARGIN` of
    what loading everything takes. Then, where the rule needs no pass of the question first and reading still takes
    longer than computing, it raises the budget until they take about the same, to ``max_budget`` at most: CacheBlend's
    r T_prefill = bytes / bandwidth. It never goes below the budget asked for, and leaves 0 and 1 as they are.

    Parameters
    ----------
    book
        The rates; an engine fills it with what its blends took.
    max_budget
        See above.
    margin
        In place of `MARGIN`.
    """

    def __init__(self, book: RateBook | None = None, max_budget: float = MAX_BUDGET, margin: float = MARGIN) -> None:
        self.book = book or RateBook()
        self.max_budget, self.margin = max_budget, margin

    def plan(self, request: LoadingRequest) -> LoadPlan:
        """Decide for one blend."""
        asked = request.settings.asked
        with self.book.lock:
            every = frozenset(range(len(request.chunks)))
            if not self.book.ready:
                return LoadPlan((), asked, asked, None)
            loaded = self._choose(request, every)
            retried = self._retried(request, loaded)
            loaded |= frozenset(retried.values())
            budget = self._raised(request, loaded)
            known = all(self.book.knows(request.chunks[i].tier) for i in loaded)
            predicted = self._cost(request, loaded, budget).seconds if known else None
        left = [span.index for i in every - loaded for span in request.chunks[i].spans]
        return LoadPlan(tuple(sorted(left)), asked, budget, predicted, tuple(retried))

    def predict(self, request: LoadingRequest, loaded: Collection[int], budget: float) -> dict[str, float]:
        """Seconds, as in `LoadPlan.predicted`, if the chunks of these indices are loaded and the rest recomputed."""
        with self.book.lock:
            return self._cost(request, loaded, budget).seconds

    def _choose(self, request: LoadingRequest, every: frozenset[int]) -> frozenset[int]:
        """The chunks to load."""
        chunks, budget = request.chunks, request.settings.asked
        deviation = request.settings.rule.needs.startswith("deviation")
        # A deviation rule must afford its first layers from the budget, which exact chunks add to.
        bound = {
            i for i, c in enumerate(chunks) if not self.book.knows(c.tier) or (deviation and not c.candidate)
        }  # fmt: skip
        choices = [self._best(request, bound, every, True)]
        if not any(chunks[i].candidate for i in bound):
            exact = frozenset(i for i in every if not chunks[i].candidate)
            choices.append(self._best(request, bound, exact, False))
        totals = [self._cost(request, choice, budget).seconds["total"] for choice in (*choices, every)]
        best = int(np.argmin(totals[:-1]))
        return choices[best] if totals[best] < (1.0 - self.margin) * totals[-1] else every

    def _best(
        self, request: LoadingRequest, bound: Collection[int], allowed: Collection[int], selecting: bool
    ) -> frozenset[int]:
        """The best choice that loads ``bound`` and some of ``allowed``, with the pass that selects or without.

        With that pass given, both bounds of the total are sums over the loaded chunks.
        """
        budget, fixed = request.settings.asked, frozenset(bound)
        free = sorted(set(allowed) - fixed)
        base = np.array(self._cost(request, fixed, budget, selecting).bounds)
        each = [np.array(self._cost(request, fixed | {i}, budget, selecting).bounds) - base for i in free]
        picked = least(base, np.array(each).reshape(-1, 2))
        return fixed | {i for i, chosen in zip(free, picked, strict=True) if chosen}

    def _retried(self, request: LoadingRequest, loaded: frozenset[int]) -> dict[str, int]:
        """By tier that was left alone for long: its smallest chunk."""
        used = {request.chunks[i].tier for i in loaded}
        found: dict[str, int] = {}
        for i in sorted(range(len(request.chunks)), key=lambda i: request.chunks[i].nbytes):
            tier = request.chunks[i].tier
            if tier not in used and self.book.avoided[tier] >= RETRY:
                found.setdefault(tier, i)
        return found

    def _raised(self, request: LoadingRequest, loaded: frozenset[int]) -> float:
        """The budget whose recompute about fills the reading time."""
        asked, chunks = request.settings.asked, request.chunks
        candidates = any(chunks[i].candidate for i in loaded)
        waits = request.settings.rule.needs in ("max", "mean")  # its recompute comes after everything was read
        if waits or not candidates or not 0.0 < asked < self.max_budget:
            return asked
        if not all(self.book.knows(chunks[i].tier) for i in loaded):
            return asked
        now = self._cost(request, loaded, asked)
        more = self._cost(request, loaded, self.max_budget).first - now.first
        spare = HEADROOM * now.read - now.first
        if spare <= 0.0 or more <= 0.0:
            return asked
        return min(self.max_budget, asked + (self.max_budget - asked) * spare / more)

    def _cost(
        self, request: LoadingRequest, loaded: Collection[int], budget: float, selecting: bool | None = None
    ) -> _Cost:
        """Predict one choice; ``selecting`` None: as the blend would do, else whether there is a pass that selects."""
        book, chunks, layers = self.book, request.chunks, request.layers
        taken = [chunks[i] for i in loaded]
        left = [s for i, c in enumerate(chunks) if i not in loaded for s in c.spans]
        if selecting is None:
            selecting = any(c.candidate for c in taken)
        whole = _plus(request.fresh, work_of(left))
        # Spread over the loaded chunks in proportion to their tokens; exactly where each token stands is not known yet.
        share = budget if selecting else 0.0
        spread = [s for c in taken for s in c.spans if s.kind == "chunk" and not (s.exact and budget >= 1.0)]
        chosen = work_of(spread)
        recompute = book.recompute.seconds(_plus(whole, chosen, share).features)
        kind = selection_kind(request.settings) if selecting and 0.0 < budget < 1.0 else None
        score = 0.0
        if kind is not None:
            others = work_of([s for c in taken for s in c.spans if not s.exact])
            score = book.selecting(kind, _plus(whole, others) if kind == "deviation" else whole, layers)
        passes = 2 if kind == "attention" else 1
        rotate = book.rotate.seconds(assembled(layers, passes, sum(c.tokens for c in taken)))
        hand = book.hand.seconds(handed(taken, layers, passes))
        read = sum(
            book.read[c.tier].seconds((layers, c.nbytes)) for c in taken if c.tier != "memory" and book.knows(c.tier)
        )
        first = score + rotate / 2 if kind == "attention" else score + rotate + recompute
        return _Cost(read, hand, book.unhidden.seconds((read,)), score, rotate, recompute, first, layers)


def selection_kind(settings: BlendSettings) -> str | None:
    """What pass a rule selects by: ``attention`` over the question's rows, ``deviation``, or None."""
    needs = settings.rule.needs
    return None if needs == "nothing" else "deviation" if needs.startswith("deviation") else "attention"


def assembled(layers: int, passes: int, tokens: int) -> tuple[float, float]:
    """Features of ``RateBook.rotate``: layers put together and stored tokens moved, over the passes of a blend."""
    return float(layers * passes), float(layers * passes * tokens)


def handed(chunks: Sequence[StoredChunk], layers: int, passes: int) -> tuple[float, float]:
    """Features of ``RateBook.hand``: chunk layers and bytes handed to the model, over the passes of a blend."""
    places = sum(len(c.spans) for c in chunks)
    return float(passes * layers * places), float(passes * sum(c.nbytes * len(c.spans) for c in chunks))


def least(base: Floats, each: Floats, exhaustive: int = EXHAUSTIVE) -> list[bool]:
    """The choice x in {0, 1}^n with the least max over two bounds of base + x . each.

    Chunks that no bound objects to are taken, those that every bound objects to are not; of the contested rest, up to
    ``exhaustive``, all combinations are tried, which is exact. Beyond that: the best of the choices that take the
    chunks with the best ratio of saving to cost, which is at most min(saving, cost) of one chunk above the optimum
    (that of the relaxation to fractions of chunks, where only one chunk is cut).

    Parameters
    ----------
    base
        ``[2]``: the bounds with no chunk taken.
    each
        ``[n, 2]``: what taking a chunk adds to each.
    """
    taken: npt.NDArray[np.bool_] = np.all(each <= 0.0, axis=1)
    contested = np.flatnonzero(~taken & (each < 0.0).any(1))
    at = base + each[taken].sum(0)
    items = each[contested]
    if len(contested) <= exhaustive:
        ways = (np.arange(1 << len(contested))[:, None] >> np.arange(len(contested))) & 1
    else:
        # Turned over, a chunk that saves on the second bound is one that saves on the first: taken unless chosen.
        turned = items[:, 0] > 0.0
        flat = np.where(turned[:, None], -items, items)
        ranks = np.argsort(np.argsort(flat[:, 0] / flat[:, 1], kind="stable"), kind="stable")
        ways = ((ranks < np.arange(len(contested) + 1)[:, None]) != turned).astype(np.int64)
    best = ways[(at + ways @ items).max(1).argmin()]
    taken[contested] = best.astype(bool)
    return [bool(t) for t in taken]


def _plus(one: Work, other: Work, share: float = 1.0) -> Work:
    return Work(one.rows + share * other.rows, one.pairs + share * other.pairs)
