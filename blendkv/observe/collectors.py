"""Metrics that are read when the page is: of the stores, and of another registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from blendkv.store.base import TierStat
    from blendkv.store.reports import StoreStat

_DAMAGE = ("missing", "truncated", "checksum", "header", "mismatch", "unreadable")
_TIER = ("store", "tier")
_VERDICTS = ("passed", "failed", "not_measured")
_GAUGES = {
    "store_bytes": ("Bytes of chunk KV by tier.", _TIER),
    "store_limit_bytes": ("Most bytes that a tier may hold.", _TIER),
    "store_chunks": ("Chunk KVs by tier.", _TIER),
    "documents": ("Documents in the collection.", ("store",)),
    "gate": ("The quality gate's verdict: 1 for the one that holds, 0 for the others.", ("store", "verdict")),
}
_COUNTERS = {
    "store_lookups": ("Look-ups by tier.", (*_TIER, "result")),
    "store_evictions": ("Evicted chunk KVs.", (*_TIER, "reason")),
    "store_damaged": ("Chunk KVs that could not be read whole, dropped or not.", _TIER),
    "store_discarded": ("Damaged chunk KVs that were dropped.", ("store", "kind")),
    "store_write_errors": ("Chunk KVs that the background could not store.", ("store",)),
    "library_chunks": (
        "Chunk KVs found (hits), computed because they were missing (computed), looked up in vain because the store "
        "failed (failed_lookups), and not stored because it failed (not_stored).", ("store", "event"),
    ),
    "library_computed_tokens": ("Tokens of chunk KV computed alone.", ("store",)),
    "incidents": ("What was mended or given up on the way to an answer.", ("store", "kind")),
}  # fmt: skip
"""By name without ``blendkv_``: what it says, and its labels."""


@dataclass(frozen=True)
class StoreFacts:
    """What the metrics show of one store.

    ``stat`` is from `blendkv.store.KVStore.stat`; ``library`` holds counts by name (``hits``, ``computed``,
    ``computed_tokens``, ``failed_lookups``, ``not_stored``); ``documents`` are those of the collection; ``incidents``
    counts what was mended or given up on the way, by a few fixed words (`blendkv.pipeline.RagPipeline.fallbacks`);
    ``gate`` is the state of `blendkv.blend.gate.Gate`.
    """

    stat: StoreStat
    library: Mapping[str, int]
    documents: int
    incidents: Mapping[str, int]
    gate: str


class StoreCollector(Collector):
    """Reads the stores when the metrics are read."""

    def __init__(self, stores: Callable[[], Mapping[str, StoreFacts]]) -> None:
        self._stores = stores

    def describe(self) -> Iterable[Metric]:
        """The families, so that registering need not read a store."""
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        """The families with what every store says now."""
        families = _families()
        for store, facts in self._stores().items():
            for tier in facts.stat.tiers:
                for name, labels, value in _of_tier(tier):
                    families[name].add_metric((store, tier.name, *labels), value)
            for name, labels, value in _of_store(facts):
                families[name].add_metric((store, *labels), value)
        return families.values()


class IncludedCollector(Collector):
    """Another registry, read when the metrics are."""

    def __init__(self, other: Collector) -> None:
        self._other = other

    def describe(self) -> Iterable[Metric]:
        """Nothing: what is in there may change."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All of it."""
        return self._other.collect()


def _families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    gauges = {
        name: GaugeMetricFamily(f"blendkv_{name}", text, labels=labels, unit="bytes" if name.endswith("bytes") else "")
        for name, (text, labels) in _GAUGES.items()
    }
    counters = {
        name: CounterMetricFamily(f"blendkv_{name}", text, labels=labels) for name, (text, labels) in _COUNTERS.items()
    }
    return {**gauges, **counters}


def _of_tier(tier: TierStat) -> Iterable[tuple[str, tuple[str, ...], float]]:
    """Samples of one tier: family, labels behind store and tier, value."""
    yield "store_bytes", (), tier.bytes
    yield "store_chunks", (), tier.chunks
    if tier.limit is not None:
        yield "store_limit_bytes", (), tier.limit
    yield "store_lookups", ("hit",), tier.hits
    yield "store_lookups", ("miss",), tier.misses
    yield "store_damaged", (), tier.damaged
    for reason, count in tier.evictions.items():
        yield "store_evictions", (reason,), count


def _of_store(facts: StoreFacts) -> Iterable[tuple[str, tuple[str, ...], float]]:
    """Samples of one store: family, labels behind the store's, value."""
    yield "documents", (), facts.documents
    for verdict in _VERDICTS:
        yield "gate", (verdict,), float(verdict == facts.gate)
    yield "store_write_errors", (), facts.stat.background_errors
    for kind, count in _bounded(facts.stat.discarded).items():
        yield "store_discarded", (kind,), count
    for event in ("hits", "computed", "failed_lookups", "not_stored"):
        yield "library_chunks", (event,), facts.library.get(event, 0)
    yield "library_computed_tokens", (), facts.library.get("computed_tokens", 0)
    for kind, count in facts.incidents.items():
        yield "incidents", (kind.replace(" ", "_"),), count


def _bounded(discarded: Mapping[str, int]) -> dict[str, int]:
    """Counts by the known kinds of damage; all others together."""
    counts = {kind: discarded[kind] for kind in _DAMAGE if kind in discarded}
    others = sum(count for kind, count in discarded.items() if kind not in _DAMAGE)
    return {**counts, "other": others} if others else counts
