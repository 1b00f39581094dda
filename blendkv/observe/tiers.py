"""What a store says of itself as metrics, whichever process it lies in: tiers, remote tiers, queues, codecs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client.utils import floatToGoString

from blendkv.observe.families import Distribution, Family, Sample, counter, gauge, histogram

if TYPE_CHECKING:
    from blendkv.store.base import TierStat
    from blendkv.store.guard import RemoteStat
    from blendkv.store.reports import StoreStat
    from blendkv.store.timing import Latency
    from blendkv.store.usage import CodecUse

_DAMAGE = ("missing", "truncated", "checksum", "header", "mismatch", "unreadable")
_REASONS = ("limit", "full", "quota")
_REFUSALS = ("limit", "quota", "price")
_ALWAYS = (("head", "ok"), ("head", "miss"))
"""Calls that are shown before there are any, for the hit rate."""
_STATES = ("closed", "open", "half_open")
_TIER = ("store", "tier")

STORE: dict[str, Family] = {
    "store_bytes": gauge("Bytes of chunk KV by tier.", *_TIER),
    "store_limit_bytes": gauge("Most bytes that a tier may hold.", *_TIER),
    "store_chunks": gauge("Chunk KVs by tier.", *_TIER),
    "store_pinned_chunks": gauge("Chunk KVs that are kept from eviction.", "store"),
    "store_lookups": counter("Look-ups by tier.", *_TIER, "result"),
    "store_call_seconds": histogram(
        "Seconds of a local tier's calls: look-ups (get), puts, and layers read from there (load).", *_TIER, "operation"
    ),
    "store_evictions": counter("Evicted chunk KVs.", *_TIER, "reason"),
    "store_refused": counter(
        "Chunk KVs for which no room could be made, or was not worth making (price).", *_TIER, "reason"
    ),
    "store_damaged": counter("Chunk KVs that could not be read whole, dropped or not.", *_TIER),
    "store_discarded": counter("Damaged chunk KVs that were dropped.", "store", "kind"),
    "store_collisions": counter("Look-ups and puts whose key was there with other token ids.", "store"),
    "store_promoted": counter("Chunk KVs that went from disk to memory.", "store"),
    "store_not_in_memory": counter("Chunk KVs that found no room in memory.", "store"),
    "store_failed_loads": counter("Chunk KVs that could not be read to their end, and are not damaged.", "store"),
    "store_write_errors": counter("Chunk KVs that the background could not store.", "store"),
    "store_pending_bytes": gauge(
        "Bytes of chunk KV that wait to be written: to disk (write), to remote tiers (upload).", "store", "queue"
    ),
    "store_pending_chunks": gauge("How many chunk KVs these are.", "store", "queue"),
    "store_uploads": counter("Chunk KVs written to remote tiers (done), or not.", "store", "result"),
    "store_codec_chunks": gauge("Chunk KVs on disk by codec.", "store", "codec"),
    "store_codec_file_bytes": gauge("Bytes of their files; over those of K and V, the ratio.", "store", "codec"),
    "store_codec_kv_bytes": gauge("Bytes of their K and V when decoded.", "store", "codec"),
    "remote_calls": counter("Calls to remote tiers by operation and outcome.", *_TIER, "operation", "outcome"),
    "remote_call_seconds": histogram("Seconds of the calls that reached a remote tier.", *_TIER, "operation"),
    "remote_circuit": gauge("The circuit breaker's state: 1 for the one that holds, else 0.", *_TIER, "state"),
    "remote_openings": counter("How often the circuit went from closed to open.", *_TIER),
    "remote_stuck_calls": gauge("Calls that outlasted their callers and hold a thread each.", *_TIER),
    "remote_bytes": counter(
        "Bytes of chunk KV written to and read from remote tiers: before (raw) and after (stored) packing.",
        *_TIER, "direction", "form",
    ),
}  # fmt: skip
"""The families of `samples`."""


def samples(store: str, stat: StoreStat, codecs: Mapping[str, CodecUse]) -> Iterable[Sample]:
    """What ``stat`` says of the store of the name ``store``, and ``codecs`` of its files."""
    for tier in stat.tiers:
        yield from ((name, (store, tier.name, *more), value) for name, more, value in _of_tier(tier))
    for name, remote in stat.named_remotes:
        yield from ((family, (store, name, *more), value) for family, more, value in _of_remote(remote))
    yield from ((name, (store, *more), value) for name, more, value in _of_store(stat))
    for codec, use in codecs.items():
        yield "store_codec_chunks", (store, codec), use.chunks
        yield "store_codec_file_bytes", (store, codec), use.file_bytes
        yield "store_codec_kv_bytes", (store, codec), use.kv_bytes


def _of_tier(tier: TierStat) -> Iterable[Sample]:
    """Samples of one tier; labels behind store and tier."""
    yield "store_bytes", (), tier.bytes
    yield "store_chunks", (), tier.chunks
    if tier.limit is not None:
        yield "store_limit_bytes", (), tier.limit
    yield "store_lookups", ("hit",), tier.hits
    yield "store_lookups", ("miss",), tier.misses
    yield "store_damaged", (), tier.damaged
    for operation, latency in tier.latencies.items():
        yield "store_call_seconds", (operation,), distribution(latency)
    for reason, count in {**dict.fromkeys(_REASONS, 0), **tier.evictions}.items():
        yield "store_evictions", (reason,), count
    for reason, count in {**dict.fromkeys(_REFUSALS, 0), **tier.refused}.items():
        yield "store_refused", (reason,), count


def _of_store(stat: StoreStat) -> Iterable[Sample]:
    """Samples of the whole store; labels behind the store's."""
    yield "store_pinned_chunks", (), stat.pinned
    for kind, count in _bounded(stat.discarded).items():
        yield "store_discarded", (kind,), count
    yield "store_collisions", (), stat.collision
    yield "store_promoted", (), stat.promoted
    yield "store_not_in_memory", (), stat.not_in_memory
    yield "store_failed_loads", (), stat.failed_loads
    yield "store_write_errors", (), stat.background_errors
    yield "store_pending_bytes", ("write",), stat.pending_bytes
    yield "store_pending_chunks", ("write",), stat.pending_chunks
    if stat.remotes:
        yield "store_pending_bytes", ("upload",), stat.upload_pending_bytes
        yield "store_pending_chunks", ("upload",), stat.upload_pending_chunks
        yield "store_uploads", ("done",), stat.uploaded
        yield "store_uploads", ("not_done",), stat.not_uploaded


def _of_remote(remote: RemoteStat) -> Iterable[Sample]:
    """Samples of one remote tier; labels behind store and tier."""
    for (operation, outcome), count in {**dict.fromkeys(_ALWAYS, 0), **remote.calls}.items():
        yield "remote_calls", (operation, outcome), count
    for operation, latency in remote.latencies.items():
        yield "remote_call_seconds", (operation,), distribution(latency)
    for state in _STATES:
        yield "remote_circuit", (state,), float(state == remote.state)
    yield "remote_openings", (), remote.openings
    yield "remote_stuck_calls", (), remote.stuck
    traffic = remote.traffic
    yield "remote_bytes", ("written", "raw"), traffic.raw_written
    yield "remote_bytes", ("written", "stored"), traffic.stored_written
    yield "remote_bytes", ("read", "raw"), traffic.raw_read
    yield "remote_bytes", ("read", "stored"), traffic.stored_read


def distribution(latency: Latency) -> Distribution:
    """A histogram's value as Prometheus wants it."""
    return Distribution([(floatToGoString(bound), count) for bound, count in latency.cumulative], latency.seconds)


def _bounded(discarded: Mapping[str, int]) -> dict[str, int]:
    """Counts by the known kinds of damage; all others together."""
    counts = {kind: discarded.get(kind, 0) for kind in _DAMAGE}
    others = sum(count for kind, count in discarded.items() if kind not in _DAMAGE)
    return {**counts, "other": others} if others else counts
