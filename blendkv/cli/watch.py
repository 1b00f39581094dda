"""`blendkv store stat --watch`: what a store holds and does, tick by tick."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from blendkv.cli.common import built_table, out
from blendkv.cli.market import asked, market_row, market_tables
from blendkv.config import format_bytes

if TYPE_CHECKING:
    from blendkv.daemon.messages import Stats
    from blendkv.store.base import TierStat
    from blendkv.store.door import Store
    from blendkv.store.guard import RemoteStat
    from blendkv.store.reports import MarketReport, StoreStat
    from blendkv.store.timing import Latency


_TENANTS = ("tenant", "name", "chunks", "on disk", "in memory", "quota")
_REMOTES = (
    "remote tier", "circuit", "p50 head", "p50 fetch", "found", "openings", "stuck", "calls/s", "read/s", "written/s",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """What a store said at a time, in seconds that only grow; ``daemon`` None: it has none, or it does not answer."""

    at: float
    store: StoreStat
    daemon: Stats | None
    up: bool | None
    """Whether its daemon answers; None for a store without one."""
    market: MarketReport | None = None
    """Its prices, if they were asked for and the daemon answers."""


def sample(store: Store, prices: int = 0) -> Sample:
    """Ask a store now, and for a price list of so many chunks.

    Raises
    ------
    InputError
        If prices are asked for and there are none; see `blendkv.cli.market.asked`.
    """
    from blendkv.daemon.client import DaemonStore
    from blendkv.daemon.connection import DownError

    if not isinstance(store, DaemonStore):
        if prices:
            asked(store, prices)
        return Sample(time.monotonic(), store.stat(), None, None)
    try:
        stats = store.daemon_stats()
        return Sample(time.monotonic(), stats.store, stats, True, asked(store, prices) if prices else None)
    except DownError:
        return Sample(time.monotonic(), store.stat(), None, False)


def tier_rows(now: Sample, before: Sample | None = None) -> list[dict[str, Any]]:
    """A row per tier: what it holds, and what happened since ``before``, per second."""
    earlier = {} if before is None else {tier.name: tier for tier in before.store.tiers}
    return [_tier_row(tier, earlier.get(tier.name), now, before) for tier in now.store.tiers]


def _tier_row(tier: TierStat, earlier: TierStat | None, now: Sample, before: Sample | None) -> dict[str, Any]:
    row = {"name": tier.name, "chunks": tier.chunks, "bytes": tier.bytes, "limit": tier.limit, "hits": tier.hits,
           "misses": tier.misses, "evictions": dict(tier.evictions), "refused": dict(tier.refused),
           "damaged": tier.damaged}  # fmt: skip
    if earlier is None or before is None:
        return row
    seconds = now.at - before.at
    return {
        **row,
        "hits_per_s": _rate(tier.hits, earlier.hits, seconds),
        "misses_per_s": _rate(tier.misses, earlier.misses, seconds),
        "bytes_per_s": (tier.bytes - earlier.bytes) / seconds,
    }


def remote_rows(now: Sample, before: Sample | None = None) -> list[dict[str, Any]]:
    """A row per remote tier: its circuit, the median call of each operation, hits, and bytes per second."""
    earlier = {} if before is None else dict(before.store.named_remotes)
    return [_remote_row(name, tier, earlier.get(name), now, before) for name, tier in now.store.named_remotes]


def _remote_row(
    name: str, tier: RemoteStat, last: RemoteStat | None, now: Sample, before: Sample | None
) -> dict[str, Any]:
    hits, misses = tier.calls.get(("head", "ok"), 0), tier.calls.get(("head", "miss"), 0)
    row = {
        "name": name, "state": tier.state, "openings": tier.openings, "stuck": tier.stuck,
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "p50_s": {operation: median(latency) for operation, latency in tier.latencies.items()},
        "calls": [{"operation": o, "outcome": outcome, "count": n} for (o, outcome), n in tier.calls.items()],
        "stored_read": tier.traffic.stored_read, "stored_written": tier.traffic.stored_written,
        "ratio": tier.traffic.ratio,
    }  # fmt: skip
    if last is None or before is None:
        return row
    pairs = {
        "calls": (sum(tier.calls.values()), sum(last.calls.values())),
        "read": (tier.traffic.stored_read, last.traffic.stored_read),
        "written": (tier.traffic.stored_written, last.traffic.stored_written),
    }
    return {**row, **{f"{what}_per_s": _rate(*pair, now.at - before.at) for what, pair in pairs.items()}}


def median(latency: Latency) -> float | None:
    """The upper bound, in seconds, of the bucket that the median lies in; None above all bounds."""
    cumulative = latency.cumulative
    bound = next(bound for bound, count in cumulative if 2 * count >= cumulative[-1][1])
    return None if bound == math.inf else bound


def _rate(now: float, then: float, seconds: float) -> float:
    """Of a count that begins anew when the daemon does."""
    return (now - then if now >= then else now) / seconds


def daemon_row(now: Sample) -> dict[str, Any] | None:
    """The daemon's own counts; None for a store without one."""
    if now.up is None:
        return None
    stats = now.daemon
    if stats is None:
        return {"up": False}
    return {"up": True, "clients": stats.clients, "loans": stats.loans, "loading": stats.loading,
            "free_bytes": stats.free_bytes, "policy": stats.policy,
            "unknown_classes": stats.strange}  # fmt: skip


def whole(now: Sample, before: Sample | None = None) -> dict[str, Any]:
    """All of it, for a JSON object."""
    stat = now.store
    return {
        "rows": tier_rows(now, before), "remotes": remote_rows(now, before), "daemon": daemon_row(now),
        "pinned": stat.pinned, "pending_bytes": stat.pending_bytes, "upload_pending_bytes": stat.upload_pending_bytes,
        "write_errors": stat.background_errors, "promoted": stat.promoted, "not_in_memory": stat.not_in_memory,
        "uploaded": stat.uploaded, "not_uploaded": stat.not_uploaded,
        "tenants": [asdict(use) for use in stat.tenants], "tenant_quota": stat.tenant_quota,
        **({} if now.market is None else {"market": market_row(now.market)}),
    }  # fmt: skip


def tables(now: Sample, before: Sample | None = None) -> Group:
    """The same for people."""
    shown = [
        (r["name"], r["chunks"], format_bytes(r["bytes"]), format_bytes(r["limit"]) if r["limit"] else None, r["hits"],
         r["misses"], sum(r["evictions"].values()), r["damaged"], _per_s(r, "hits"), _per_s(r, "misses"),
         _bytes_per_s(r, "bytes"))
        for r in tier_rows(now, before)
    ]  # fmt: skip
    columns = (
        "tier",
        "chunks",
        "bytes",
        "limit",
        "hits",
        "misses",
        "evicted",
        "damaged",
        "hits/s",
        "misses/s",
        "bytes/s",
    )
    parts: list[Any] = [built_table("tiers", columns, shown)]
    remotes = [
        (r["name"], r["state"], _seconds(r["p50_s"].get("head")), _seconds(r["p50_s"].get("fetch")),
         None if r["hit_rate"] is None else f"{r['hit_rate']:.0%}", r["openings"], r["stuck"], _per_s(r, "calls"),
         _bytes_per_s(r, "read"), _bytes_per_s(r, "written"))
        for r in remote_rows(now, before)
    ]  # fmt: skip
    if remotes:
        parts.append(built_table("remote tiers", _REMOTES, remotes))
    if tenants := _tenant_rows(now.store):
        parts.append(built_table("tenants", _TENANTS, tenants))
    if now.market is not None:
        parts += market_tables(now.market)
    return Group(*parts, Text(_line(now)))


def _tenant_rows(stat: StoreStat) -> list[tuple[Any, ...]]:
    """A row per tenant; none where all chunks are nobody's and nobody has a quota."""
    if not any(use.tag for use in stat.tenants):
        return []
    return [
        (use.tag[:12] or "none", use.name, use.chunks, format_bytes(use.disk_bytes), format_bytes(use.memory_bytes),
         None if use.quota is None else format_bytes(use.quota))
        for use in stat.tenants
    ]  # fmt: skip


def _line(now: Sample) -> str:
    stat, daemon = now.store, now.daemon
    words = f"{stat.pinned} pinned, {format_bytes(stat.pending_bytes)} wait to be written"
    if stat.remotes:
        words += f", {format_bytes(stat.upload_pending_bytes)} to be uploaded ({stat.not_uploaded} could not be)"
    if now.up is None:
        return f"{words}; no daemon runs: hits and misses are those of this command"
    if daemon is None:
        return f"{words}; the daemon does not answer, and this is the last that it said"
    return (
        f"{words}; daemon: {daemon.clients} clients use {daemon.loans} chunk KVs, {daemon.loading} are on their way, "
        f"{format_bytes(daemon.free_bytes)} of shared memory free, policy {daemon.policy}"
    )


def _per_s(row: dict[str, Any], name: str) -> str | None:
    value = row.get(f"{name}_per_s")
    return None if value is None else f"{value:,.1f}"


def _bytes_per_s(row: dict[str, Any], name: str) -> str | None:
    value = row.get(f"{name}_per_s")
    return None if value is None else f"{'-' if value < 0 else ''}{format_bytes(int(abs(value)))}"


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"<= {value * 1e3:g} ms"


def watch(store: Store, seconds: float, as_json: bool, prices: int = 0) -> None:
    """Show the store every ``seconds`` seconds until Ctrl-C: a live table, or one JSON object a line.

    With a price list of ``prices`` chunks; `InputError` as from `sample`.
    """
    with suppress(KeyboardInterrupt):
        if as_json:
            for now, before in _ticks(store, seconds, prices):
                print(json.dumps(whole(now, before)), flush=True)
        elif not out.is_terminal:
            for now, before in _ticks(store, seconds, prices):
                out.print(tables(now, before))
        else:
            with Live(console=out, auto_refresh=False, screen=True) as live:
                for now, before in _ticks(store, seconds, prices):
                    live.update(tables(now, before), refresh=True)


def _ticks(store: Store, seconds: float, prices: int) -> Iterator[tuple[Sample, Sample | None]]:
    before = None
    while True:
        now = sample(store, prices)
        yield now, before
        before = now
        time.sleep(seconds)
