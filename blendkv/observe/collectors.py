"""Metrics that are read when the page is: of the stores of a server, and of another registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from blendkv.observe.families import Sample, counter, filled, gauge, histogram
from blendkv.observe.tiers import STORE, distribution, samples

if TYPE_CHECKING:
    from blendkv.store.reports import StoreStat
    from blendkv.store.timing import Latency
    from blendkv.store.usage import CodecUse

_VERDICTS = ("passed", "failed", "not_measured")
_FAMILIES = {
    **STORE,
    "documents": gauge("Documents in the collection.", "store"),
    "gate": gauge(
        "The quality gate's verdict: 1 for the one that holds, 0 for the others.", "store", "verdict"
    ),
    "library_chunks": counter(
        "Chunk KVs found (hits), computed because they were missing (computed), looked up in vain because the store "
        "failed (failed_lookups), not stored because it failed (not_stored), or because what would have left is worth "
        "more (not_worth_storing).", "store", "event",
    ),
    "library_computed_tokens": counter("Tokens of chunk KV computed alone.", "store"),
    "incidents": counter("What was mended or given up on the way to an answer.", "store", "kind"),
    "daemon_up": gauge("Whether the store's daemon answers; nothing for a store in this process.", "store"),
    "daemon_reconnects": counter("How often a daemon that was gone was found again.", "store"),
    "daemon_missed_calls": counter("Look-ups and other calls that found no daemon.", "store"),
    "daemon_pin_failures": counter("How often a daemon's memory could not be page-locked for CUDA.", "store"),
}  # fmt: skip


_PROCESS = {
    "codec_seconds": histogram("Seconds to encode and decode one layer of a chunk KV.", "codec", "operation"),
}


@dataclass(frozen=True)
class ClientFacts:
    """A daemon as its client sees it; see `blendkv.daemon.client.DaemonStore`."""

    up: bool
    reconnects: int
    missed: int
    pin_failures: int


@dataclass(frozen=True)
class StoreFacts:
    """What the metrics show of one store.

    ``stat`` is from `blendkv.store.KVStore.stat`; ``library`` holds counts by name (``hits``, ``computed``,
    ``computed_tokens``, ``failed_lookups``, ``not_stored``, ``not_worth_storing``); ``documents`` are those of the
    collection; ``incidents`` counts what was mended or given up on the way, by a few fixed words
    (`blendkv.pipeline.RagPipeline.fallbacks`); ``gate`` is the state of `blendkv.blend.gate.Gate`. ``codecs`` is what
    is on disk by codec, known where the store lies in this process; ``daemon`` is there where it does not.
    """

    stat: StoreStat
    library: Mapping[str, int]
    documents: int
    incidents: Mapping[str, int]
    gate: str
    codecs: Mapping[str, CodecUse] = field(default_factory=dict)
    daemon: ClientFacts | None = None


class StoreCollector(Collector):
    """Reads the stores when the metrics are read."""

    def __init__(self, stores: Callable[[], Mapping[str, StoreFacts]]) -> None:
        self._stores = stores

    def describe(self) -> Iterable[Metric]:
        """The families, so that registering need not read a store."""
        return filled(_FAMILIES)

    def collect(self) -> Iterable[Metric]:
        """The families with what every store says now."""
        return filled(_FAMILIES, (sample for name, facts in self._stores().items() for sample in _of(name, facts)))


class CodecCollector(Collector):
    """What codecs took in this process: ``timings`` by ``CODEC OPERATION``, read when the metrics are."""

    def __init__(self, timings: Callable[[], Mapping[str, Latency]]) -> None:
        self._timings = timings

    def describe(self) -> Iterable[Metric]:
        """The family, so that registering reads nothing."""
        return filled(_PROCESS)

    def collect(self) -> Iterable[Metric]:
        """The family with what was measured so far."""
        rows = self._timings().items()
        return filled(_PROCESS, [("codec_seconds", tuple(name.split()), distribution(found)) for name, found in rows])


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


def _of(store: str, facts: StoreFacts) -> Iterable[Sample]:
    """Samples of one store."""
    yield from samples(store, facts.stat, facts.codecs)
    yield "documents", (store,), facts.documents
    for verdict in _VERDICTS:
        yield "gate", (store, verdict), float(verdict == facts.gate)
    for event in ("hits", "computed", "failed_lookups", "not_stored", "not_worth_storing"):
        yield "library_chunks", (store, event), facts.library.get(event, 0)
    yield "library_computed_tokens", (store,), facts.library.get("computed_tokens", 0)
    for kind, count in facts.incidents.items():
        yield "incidents", (store, kind.replace(" ", "_")), count
    if facts.daemon is not None:
        yield "daemon_up", (store,), float(facts.daemon.up)
        yield "daemon_reconnects", (store,), facts.daemon.reconnects
        yield "daemon_missed_calls", (store,), facts.daemon.missed
        yield "daemon_pin_failures", (store,), facts.daemon.pin_failures
