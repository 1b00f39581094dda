"""What a daemon says of the prices in its memory, for people and for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from blendkv.cli.common import built_table
from blendkv.config import format_bytes
from blendkv.errors import InputError

if TYPE_CHECKING:
    from blendkv.market.policy import Price
    from blendkv.store.door import Store
    from blendkv.store.reports import MarketReport

PRICE_COLUMNS = (
    "leaves first", "bytes", "class", "kind", "age", "uses", "P(reuse)", "within", "s saved per GB and hour",
)  # fmt: skip
_PER_GB_HOUR = 1e9 * 3600


def asked(store: Store, count: int) -> MarketReport:
    """The report of the store's daemon.

    Raises
    ------
    InputError
        If the store has no daemon, or its policy keeps no prices.
    StoreError
        If the daemon does not answer.
    """
    from blendkv.daemon.client import DaemonStore

    if not isinstance(store, DaemonStore):
        raise InputError(
            f"no daemon runs for the store {store.path}, and only a running one knows prices; start one: "
            f"blendkv daemon --store {store.path} --policy market"
        )
    return store.market(count)


def market_row(report: MarketReport) -> dict[str, Any]:
    """All of it, for a JSON object; seconds, bytes, and prices in seconds saved per GB and hour."""
    return {
        "prices": [_price_row(price) for price in report.prices],
        "memory_limit": report.limit, "since_s": report.seconds, "saved_s": report.saved,
        "what_if": [
            {"factor": factor, "bytes": round(report.limit * factor), "saved_s": report.saved + saved}
            for factor, saved in report.grown
        ],
        "next_gb_saves_s_per_hour": report.marginal,
    }  # fmt: skip


def _price_row(price: Price) -> dict[str, Any]:
    return {
        "key": price.key, "bytes": price.nbytes, "class": price.workload, "kind": price.kind, "age_s": price.age,
        "uses": price.uses, "reuse": price.reuse, "horizon_s": price.horizon, "hit_saves_s": price.saved,
        "saves_s_per_gb_hour": price.price * _PER_GB_HOUR,
    }  # fmt: skip


def market_tables(report: MarketReport) -> list[Table | Text]:
    """The same for people: the price list, and what other sizes would have saved."""
    prices = [
        (row["key"][:16], format_bytes(row["bytes"]), row["class"], row["kind"], f"{row['age_s']:,.0f} s", row["uses"],
         f"{row['reuse']:.0%}", f"{row['horizon_s']:,.0f} s", f"{row['saves_s_per_gb_hour']:,.3g}")
        for row in map(_price_row, report.prices)
    ]  # fmt: skip
    sizes = [("as it is", format_bytes(report.limit), f"{report.saved:,.1f} s")]
    sizes += [
        (f"x {factor:g}", format_bytes(round(report.limit * factor)), f"{report.saved + saved:,.1f} s")
        for factor, saved in report.grown
    ]
    return [
        built_table("price list", PRICE_COLUMNS, prices),
        built_table("what if", ("memory", "bytes", "prefill saved"), sizes),
        Text(marginal_line(report)),
    ]


def marginal_line(report: MarketReport) -> str:
    """What the next gigabyte of memory is worth."""
    hours = report.seconds / 3600
    return f"1 GB more would save {report.marginal:,.1f} s of prefill an hour, by what was seen in {hours:,.1f} h"
