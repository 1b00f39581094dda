"""Books of known rates, and prompts without a model, for the loading planner."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from blendkv.blend import BlendSettings
from blendkv.blend.layout import Layout, Span
from blendkv.blend.loading import LoadingRequest, StoredChunk
from blendkv.blend.rates import Line, RateBook


def teach(line: Line, coefficients: Sequence[float], rng: random.Random, times: int = 12) -> None:
    """Show a line work of many sizes that takes exactly what the coefficients say."""
    for _ in range(times):
        features = [rng.uniform(1.0, 20_000.0) for _ in coefficients]
        if len(features) == 3:  # a pass: one, rows, pairs
            rows = rng.uniform(10.0, 1000.0)
            features = [1.0, rows, rows * rng.uniform(50.0, 1000.0)]
        line.add(features, sum(c * f for c, f in zip(coefficients, features, strict=True)))


def book_of(
    rng: random.Random,
    *,
    row: float,
    read: Mapping[str, float],
    pair: float = 0.0,
    move: float = 0.0,
    score: float | None = None,
    unhidden: float = 0.0,
) -> RateBook:
    """Seconds per recomputed row and pair, per byte read by tier, per token moved in a layer, per scored row."""
    book = RateBook()
    teach(book.recompute, (1e-6, row, pair), rng)
    teach(book.rotate, (1e-9, move), rng)
    if score is not None:
        teach(book.selection["attention"], (1e-6, score, pair), rng)
    for tier, seconds in read.items():
        teach(book.read[tier], (1e-9, seconds), rng)
    if unhidden:
        teach(book.unhidden, (unhidden,), rng)
    return book


def request_of(
    settings: BlendSettings,
    sizes: Sequence[int],
    tiers: Sequence[str],
    *,
    system: int = 20,
    question: int = 12,
    bytes_per_token: int = 100,
    layers: int = 8,
) -> LoadingRequest:
    """A system prefix and the first chunk exact, further chunks, a question; all but the question are stored."""
    kinds = ["system", *["chunk"] * len(sizes), "query"]
    spans, start = [], 0
    for index, (kind, size) in enumerate(zip(kinds, (system, *sizes, question), strict=True)):
        spans.append(Span(index, kind, start, start + size, kind != "query", index < 2))
        start += size
    chunks = [
        StoredChunk((span,), tier, len(span) * bytes_per_token)
        for span, tier in zip(spans[:-1], ("memory", *tiers), strict=True)
    ]
    return LoadingRequest(Layout(tuple(spans), 0, start), tuple(chunks), layers, settings)
