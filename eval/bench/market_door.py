"""Overload of one engine with and without admission control: time to the first token by class, in a simulated queue.

The tier is the engine's own here: the door is an engine's, and its queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from blendkv.errors import InputError
from blendkv.eval.bench.market import MarketSettings
from blendkv.eval.bench.market_parts import check_policies, load_trace, maker, spread
from blendkv.eval.bench.rows import Row
from blendkv.market.costs import CostModel
from blendkv.market.doorkeeper import Doorkeeper
from blendkv.market.generate import ENGINES
from blendkv.market.queueing import Gatekeeper, Queued, QueueSettings, simulate
from blendkv.market.replay import Cache

LOOPS = ("open", "closed")
OVERLOAD = 1.5
"""Times the rate that the server can bear."""
INTERACTIVE = ("agent", "chat")
_IDLE = 0.02
_SLOWER = 16.0
_STARVED = 3.0
_FASTER, _LOSS = 2.0, 0.05


@dataclass(frozen=True)
class DoorSettings:
    """What is simulated.

    Attributes
    ----------
    policies
        Of the cache; each with and without admission control.
    fraction
        Cache size, as a share of the trace's distinct KV bytes.
    overload
        Offered requests per second over those that the server can bear, first come first served (`bearable`).
    loops
        ``open``: all come at their times; ``closed``: a turn comes after the answer before it.
    """

    policies: Sequence[str] = ("lru", "market")
    fraction: float = 0.1
    overload: float = OVERLOAD
    loops: Sequence[str] = LOOPS

    def __post_init__(self) -> None:
        check_policies(self.policies)
        if not self.loops or not set(self.loops) <= set(LOOPS):
            raise InputError(f"loops {', '.join(self.loops)}; allowed: {', '.join(LOOPS)}")
        if not 0.0 < self.fraction <= 1.0 or not self.overload > 0.0:
            raise InputError(f"fraction {self.fraction}, overload {self.overload}; both must be above 0")


class DoorTask(NamedTuple):
    """One policy under overload in one loop, on the mixed trace of a seed."""

    seed: int
    policy: str
    loop: str
    length: int
    rate: float
    costs: CostModel
    settings: DoorSettings


def run_door(
    settings: DoorSettings,
    market: MarketSettings,
    costs: CostModel,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Overload the mixed trace of each seed; see `overload_rows`."""
    tasks = [
        DoorTask(seed, policy, loop, market.length, market.pace(costs) / ENGINES, costs, settings)
        for seed in market.seeds
        for policy in settings.policies
        for loop in settings.loops
    ]
    rows: list[Row] = []
    for pair in spread(overload_rows, tasks, market.jobs):
        rows += pair
        for row in pair:
            p99 = row["by_class"]["interactive"]["p99_ttft_ms"]
            about = f"{row['loop']} loop, seed {row['seed']}, {row['policy']}, admission {row['admission']}"
            tell(f"overload, {about}: p99 {p99:,.0f} ms")
    return rows


def overload_rows(task: DoorTask) -> list[Row]:
    """A row first come first served, and one behind the door, at the same load and cache size.

    A request counts as starved if it waited `_STARVED` times as long as the longest wait without admission control.
    """
    settings = task.settings
    usual = load_trace("mixed", task.seed, task.length, task.rate)
    capacity = int(usual.distinct_tokens * task.costs.token_bytes * settings.fraction)
    queue = QueueSettings(closed=task.loop == "closed")

    def run(rate: float, gatekeeper: Gatekeeper | None = None, queue: QueueSettings = queue) -> Queued:
        trace = load_trace("mixed", task.seed, task.length, rate)
        return simulate(trace, Cache(capacity, maker(task.policy)(capacity, trace), task.costs), queue, gatekeeper)

    borne = bearable(run, task.rate)
    rate = settings.overload * borne
    without = run(rate)
    without.starved_after = max(_STARVED * without.longest_wait, 1.0)
    guarded = run(rate, Doorkeeper(), replace(queue, starved=without.starved_after))
    about = {
        "policy": task.policy, "loop": task.loop, "trace": usual.name, "seed": task.seed, "cache_bytes": capacity,
        "bearable_per_s": borne, "offered_per_s": rate,
    }  # fmt: skip
    return [{**about, "admission": name, **_figures(q)} for name, q in (("none", without), ("door", guarded))]


def bearable(run: Callable[[float], Queued], rate: float) -> float:
    """Requests per second at which the server has nothing to do `_IDLE` of the time, to within 5 %.

    It is searched for: the more sessions are under way, the less a cache holds of each. ``rate`` is where to begin.
    """
    busy = run(rate).busy
    least, most = (rate, rate / busy) if busy < 1.0 - _IDLE else (rate / _SLOWER, rate)
    while most > 1.05 * least:
        middle = math.sqrt(least * most)
        if run(middle).busy < 1.0 - _IDLE:
            least = middle
        else:
            most = middle
    return least


def _figures(result: Queued) -> dict[str, Any]:
    classes = sorted({served.request.use.workload for served in result.served})
    parts = {"interactive": result.of(*INTERACTIVE), **{name: result.of(name) for name in classes}}
    return {
        "p50_ttft_ms": _ms(result, 50), "p99_ttft_ms": _ms(result, 99), "throughput": result.throughput,
        "tokens_per_s": result.tokens_per_s, "busy": result.busy, "makespan_s": result.makespan,
        "longest_wait_s": result.longest_wait, "starved": result.starved, "starved_after_s": result.starved_after,
        "refused": result.refused, "lost": result.lost,
        "by_class": {
            name: {"p50_ttft_ms": _ms(part, 50), "p99_ttft_ms": _ms(part, 99), "longest_wait_s": part.longest_wait}
            for name, part in parts.items()
        },
    }  # fmt: skip


def _ms(result: Queued, percentile: float) -> float | None:
    seconds = result.ttft(percentile)
    return None if seconds is None else seconds * 1e3


def door_missed(rows: Sequence[Row], policy: str = "market") -> list[str]:
    """A line per aim that is missed: p99 of agent and chat turns, throughput, starvation.

    The first is asked of the open loop only: in a closed one requests do not come 1.5 times as fast as they can be
    served, because who waits does not ask.
    """
    lines = []
    pairs: dict[Any, dict[str, Row]] = {}
    for row in rows:
        if row["policy"] == policy:
            pairs.setdefault((row["loop"], row["seed"]), {})[row["admission"]] = row
    for (loop, seed), pair in pairs.items():
        without, door = pair["none"], pair["door"]
        before, after = (r["by_class"]["interactive"]["p99_ttft_ms"] for r in (without, door))
        about = f"overload, {loop} loop, seed {seed}"
        if loop == "open" and before and after and before < _FASTER * after:
            lines.append(f"{about}: p99 TTFT of agent and chat {before / after:.2f}x lower, {_FASTER:g}x is asked")
        kept = door["tokens_per_s"] / without["tokens_per_s"]
        if kept < 1.0 - _LOSS:
            lines.append(f"{about}: throughput {kept:.3f} of that without, in prompt tokens; {1.0 - _LOSS} is asked")
        if door["starved"]:
            lines.append(f"{about}: {door['starved']} requests starved")
    return lines
