"""Selectors: the rules that choose which tokens are recomputed.

Every rule gets the same number of tokens for the same honest budget. To add one, write a function from
`SelectionContext` to `Selection` and register it (docs/selectors.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from blendkv.blend.layout import Span
from blendkv.blend.shift import ShiftKind
from blendkv.kernels import topk_by_budget
from blendkv.registry import Registry

HEAD = 4
"""Tokens at a chunk's head that carry the false attention sink of a chunk computed alone."""
PROBES = 4
"""Evenly spaced tokens per chunk that `head_query` keeps for the shift alone."""

Needs = Literal["nothing", "max", "mean", "deviation_k", "deviation_v", "deviation_kv"]


@dataclass(frozen=True)
class SelectionContext:
    """What a rule may look at: the same on every tensor-parallel rank, so that all of them choose the same tokens.

    ``spans`` are the candidates; ``count`` the tokens to choose, at most the candidates' total; ``scores`` is
    ``[total]`` float32 by absolute position (zeros for rules that need none); ``seed`` is fixed by the prompt.
    """

    spans: tuple[Span, ...]
    count: int
    scores: torch.Tensor
    seed: int

    def places(self, offset: int, length: int) -> torch.Tensor:
        """Positions ``offset .. offset + length - 1`` of every span, as far as it reaches."""
        parts = [torch.arange(s.start + offset, min(s.start + offset + length, s.stop)) for s in self.spans]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def top(self, forced: torch.Tensor) -> torch.Tensor:
        """``forced`` positions and the best-scored others, ``count`` in all, ascending."""
        total = len(self.scores)
        allowed = torch.zeros(total, dtype=torch.bool)
        for span in self.spans:
            allowed[span.start : span.stop] = True
        must = torch.zeros(total, dtype=torch.bool)
        must[forced] = True
        scores = torch.where(allowed, self.scores.cpu(), torch.tensor(float("-inf")))
        return topk_by_budget(scores, must, self.count)


@dataclass(frozen=True)
class Selection:
    """Absolute positions to recompute, ascending int64, and those among them that estimate the shift."""

    positions: torch.Tensor
    probes: torch.Tensor


@dataclass(frozen=True)
class Selector:
    """A rule with its defaults. ``needs`` names the pass that fills the scores."""

    name: str
    choose: Callable[[SelectionContext], Selection]
    needs: Needs
    budget: float
    shift: ShiftKind


SELECTORS: Registry[Selector] = Registry("selector")


def register_selector(
    name: str, *, needs: Needs = "nothing", budget: float, shift: ShiftKind = "off"
) -> Callable[[Callable[[SelectionContext], Selection]], Callable[[SelectionContext], Selection]]:
    """File a rule under a name, with its default budget and shift."""

    def add(choose: Callable[[SelectionContext], Selection]) -> Callable[[SelectionContext], Selection]:
        SELECTORS.add(name)(Selector(name, choose, needs, budget, shift))
        return choose

    return add


def _round_robin(lengths: list[int], count: int) -> list[int]:
    """Share ``count`` among spans evenly, none above its length."""
    shares = [0] * len(lengths)
    while count > 0:
        open_spans = [i for i, n in enumerate(lengths) if shares[i] < n]
        each = max(1, count // len(open_spans))
        for i in open_spans:
            step = min(each, lengths[i] - shares[i], count)
            shares[i] += step
            count -= step
    return shares


def _evenly(start: int, stop: int, count: int) -> torch.Tensor:
    """``count`` positions in the middle of equal parts of ``start .. stop - 1``."""
    return start + ((torch.arange(count) + 0.5) * ((stop - start) / max(1, count))).long()


def _body(positions: torch.Tensor, spans: tuple[Span, ...]) -> torch.Tensor:
    """The positions that are not among the first `HEAD` of their chunk."""
    keep = torch.zeros(len(positions), dtype=torch.bool)
    for span in spans:
        keep |= (positions >= span.start + HEAD) & (positions < span.stop)
    return positions[keep]


def _with_body_probes(context: SelectionContext, positions: torch.Tensor) -> Selection:
    return Selection(positions, _body(positions, context.spans))


def choose(rule: Selector, context: SelectionContext, probes: int | None) -> Selection:
    """Let a rule choose; with ``probes``, that many evenly spaced tokens per chunk join, and they alone estimate.

    They are part of ``context.count``, and take at most half of it.
    """
    if probes is None:
        return rule.choose(context)
    room = [min(probes, max(0, len(s) - HEAD)) for s in context.spans]
    shares = _round_robin(room, min(context.count // 2, sum(room)))
    parts = [_evenly(s.start + HEAD, s.stop, n) for s, n in zip(context.spans, shares, strict=True) if n]
    estimating = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    positions, asked = estimating, context.count - len(estimating)
    while len(positions) < context.count:  # what both have chosen leaves room for more of the rule's
        chosen = rule.choose(replace(context, count=asked)).positions
        joined = torch.cat((estimating, chosen)).unique()
        if len(joined) > context.count:
            break
        positions = joined
        asked += max(1, context.count - len(joined))
        if asked > context.count:
            break
    return Selection(positions, estimating)


@register_selector("head_query", needs="max", budget=0.05, shift="trend")
def head_query(context: SelectionContext) -> Selection:
    """First 4 tokens of each chunk, up to 4 evenly spaced probes each, the rest by the question's peak attention."""
    lengths = [min(HEAD, len(s)) for s in context.spans]
    if context.count <= sum(lengths):
        return chunk_head(context)
    left = context.count - sum(lengths)
    room = [max(0, len(s) - HEAD) for s in context.spans]
    shares = _round_robin([min(PROBES, n) for n in room], min(left, sum(min(PROBES, n) for n in room)))
    probes = [_evenly(s.start + HEAD, s.stop, n) for s, n in zip(context.spans, shares, strict=True) if n]
    chosen = torch.cat(probes) if probes else torch.empty(0, dtype=torch.int64)
    return Selection(context.top(torch.cat((context.places(0, HEAD), chosen))), chosen)


@register_selector("strided", budget=0.03, shift="js")
def strided(context: SelectionContext) -> Selection:
    """First 4 tokens of each chunk, the rest evenly spaced inside it: known before anything is loaded."""
    shares = _round_robin([len(s) for s in context.spans], context.count)
    parts = []
    for span, share in zip(context.spans, shares, strict=True):
        head = min(HEAD, share)
        parts += [torch.arange(span.start, span.start + head), _evenly(span.start + head, span.stop, share - head)]
    return _with_body_probes(context, torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64))


@register_selector("query_attention", needs="mean", budget=0.15)
def query_attention(context: SelectionContext) -> Selection:
    """The tokens that the question attends to on average (InfoFlow, ProphetKV, QCFuse)."""
    return _with_body_probes(context, context.top(torch.empty(0, dtype=torch.int64)))


@register_selector("chunk_head", budget=0.05)
def chunk_head(context: SelectionContext) -> Selection:
    """The first tokens of every chunk (EPIC's LegoLink, arXiv 2410.15332)."""
    shares = _round_robin([len(s) for s in context.spans], context.count)
    parts = [torch.arange(s.start, s.start + n) for s, n in zip(context.spans, shares, strict=True)]
    return _with_body_probes(context, torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64))


def _by_deviation(context: SelectionContext) -> Selection:
    """The tokens whose KV deviates most at layer 1 (CacheBlend, arXiv 2405.16444)."""
    return _with_body_probes(context, context.top(torch.empty(0, dtype=torch.int64)))


register_selector("kv_deviation", needs="deviation_v", budget=0.15)(_by_deviation)
register_selector("kv_deviation_k", needs="deviation_k", budget=0.15)(_by_deviation)
register_selector("kv_deviation_kv", needs="deviation_kv", budget=0.15)(_by_deviation)


@register_selector("random", budget=0.15)
def random(context: SelectionContext) -> Selection:
    """A uniform sample: the control that any rule must beat."""
    everything = torch.cat(
        [torch.arange(s.start, s.stop) for s in context.spans] or [torch.empty(0, dtype=torch.int64)]
    )
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(context.seed))
    return _with_body_probes(context, everything[order[: context.count]].sort().values)
