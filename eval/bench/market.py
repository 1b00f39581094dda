"""`blendkv bench market`: every policy on every trace at every cache size, against the best classic one and Belady.

Seconds saved are simulated (`blendkv.market.replay`), with the policies' own code and with costs that are given or
measured here. While a check is red (`blendkv.eval.bench.market_checks`), no ratio is given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from blendkv.errors import InputError
from blendkv.eval.bench.market_checks import problems
from blendkv.eval.bench.market_parts import (
    CLASSIC,
    OFFLINE,
    all_policies,
    check_policies,
    engines,
    is_generated,
    load_trace,
    maker,
    spread,
)
from blendkv.eval.bench.rows import Row
from blendkv.market.base import EvictionPolicy
from blendkv.market.costs import CostModel, given
from blendkv.market.generate import LENGTH, RATE, TRACES
from blendkv.market.queueing import waits
from blendkv.market.replay import Cache, KeepsAll, Tally, Timed, replay

TUNING_SEEDS = (1, 2, 3)
"""Seeds that the market's constants were chosen on; no figure is reported on them."""
REPORT_SEEDS = (11, 12, 13)
"""Seeds that figures are reported on."""
FRACTIONS = (0.02, 0.05, 0.1, 0.2)
"""Cache sizes, as shares of a trace's distinct KV bytes."""


@dataclass(frozen=True)
class MarketSettings:
    """What is replayed.

    Attributes
    ----------
    traces
        Names of generated traces, or paths of files in Mooncake's format.
    policies
        Names; every one by default.
    seeds
        Of generated traces; a file is replayed once.
    fractions
        Cache sizes, as shares of the distinct KV bytes.
    length
        Requests per generated trace, and at most per file where it is not the default.
    rate
        Requests per second of generated traces; None for `RATE`, slowed down as prefill is slower than with the given
        costs, so that the load on the server is about the same.
    jobs
        Processes.
    """

    traces: Sequence[str] = TRACES.names()
    policies: Sequence[str] = ()
    seeds: Sequence[int] = REPORT_SEEDS
    fractions: Sequence[float] = FRACTIONS
    length: int = LENGTH
    rate: float | None = None
    jobs: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def __post_init__(self) -> None:
        for name in ("traces", "seeds", "fractions"):
            if not getattr(self, name):
                raise InputError(f"no {name} are given; name at least one")
        check_policies(self.policies)
        for trace in self.traces:
            is_generated(trace)
        if not all(0.0 < fraction <= 1.0 for fraction in self.fractions):
            raise InputError(f"fractions {', '.join(map(str, self.fractions))}; shares above 0, to 1, are allowed")
        if self.length < 1 or self.jobs < 1 or not (self.rate is None or 0.0 < self.rate < 1e6):
            raise InputError(f"length {self.length}, rate {self.rate}, jobs {self.jobs}; all must be above 0")

    @property
    def chosen(self) -> tuple[str, ...]:
        """The policies that are replayed."""
        return tuple(self.policies) or all_policies()

    @property
    def judged(self) -> bool:
        """Whether the load is the one that the aims are for."""
        return self.length == LENGTH and self.rate is None and not set(self.seeds) & set(TUNING_SEEDS)

    def pace(self, costs: CostModel) -> float:
        """Requests per second of generated traces."""
        return self.rate or RATE * given().linear / costs.linear


class Task(NamedTuple):
    """One replay. ``seed`` is None for a file; ``fraction`` 1 holds everything."""

    trace: str
    seed: int | None
    policy: str
    fraction: float
    length: int
    rate: float
    costs: CostModel


@dataclass(frozen=True)
class MarketResult:
    """Rows; a line per trace on what it is; a line per check that is red, and per aim that is missed."""

    rows: list[Row]
    traces: dict[str, str]
    costs: CostModel
    problems: list[str]
    missed: list[str]


def run_market(
    settings: MarketSettings, costs: CostModel | None = None, tell: Callable[[str], None] = lambda line: None
) -> MarketResult:
    """Replay all there is to replay.

    Parameters
    ----------
    settings
        What is replayed.
    costs
        `blendkv.market.costs.given` by default.
    tell
        Called with a line per replay.

    Raises
    ------
    InputError
        If a trace cannot be read.
    """
    costs = costs or given()
    red = problems({name: maker(name) for name in settings.chosen}, costs)
    for line in red:
        tell(f"red: {line}")
    tasks = list(_tasks(settings, costs))
    traces = {task.trace: load_trace(task.trace, task.seed, task.length, task.rate).about for task in tasks}
    rows = []
    for row in spread(run_task, tasks, settings.jobs):
        rows.append(row)
        tell(
            f"{len(rows)}/{len(tasks)} {row['trace']} seed {row['seed']} {row['cache_fraction']:.0%} {row['policy']}: "
            f"{row['seconds_saved']:.1f} of {row['seconds_total']:.1f} s saved, {row['policy_us']:.1f} us per event"
        )
    _compare(rows, ratios=not red)
    return MarketResult(rows, traces, costs, red, missed(rows) if settings.judged and not red else [])


def _tasks(settings: MarketSettings, costs: CostModel) -> Iterator[Task]:
    for trace in settings.traces:
        for seed in settings.seeds if is_generated(trace) else (None,):
            for fraction in settings.fractions:
                for policy in settings.chosen:
                    yield Task(trace, seed, policy, fraction, settings.length, settings.pace(costs), costs)


@lru_cache(maxsize=2)
def _ceiling(name: str, seed: int | None, length: int, rate: float, costs: CostModel) -> float:
    """Seconds that a cache saves which holds everything."""
    trace = load_trace(name, seed, length, rate)
    return replay(trace, Cache(trace.distinct_tokens * costs.token_bytes, KeepsAll(), costs)).all.saved


def run_task(task: Task) -> Row:
    """Replay once; ratios are not filled in yet."""
    trace = load_trace(task.trace, task.seed, task.length, task.rate)
    capacity = int(trace.distinct_tokens * task.costs.token_bytes * task.fraction)
    timed = Timed(maker(task.policy)(capacity, trace))
    result = replay(trace, Cache(capacity, cast(EvictionPolicy, timed), task.costs))
    arrivals = [request.arrival for request in trace.requests]
    servers = engines(trace, task.costs)
    ttft = np.add(waits(arrivals, result.services, servers), result.services) * 1e3
    return {
        "policy": task.policy, "trace": trace.name, "seed": task.seed, "cache_fraction": task.fraction,
        "cache_bytes": capacity, **_figures(result.all),
        "seconds_ceiling": _ceiling(task.trace, task.seed, task.length, task.rate, task.costs),
        "engines": servers,
        "p50_ttft_ms": float(np.percentile(ttft, 50)), "p99_ttft_ms": float(np.percentile(ttft, 99)),
        "policy_us": timed.seconds / max(1, timed.calls) * 1e6, "requests_per_s": len(trace) / result.wall,
        "by_class": {name: _figures(tally) for name, tally in sorted(result.classes.items())},
    }  # fmt: skip


def _figures(tally: Tally) -> dict[str, Any]:
    return {
        "requests": tally.requests, "seconds_saved": tally.saved, "seconds_total": tally.total,
        "hit_rate": tally.hit_rate, "evictions": tally.evictions, "regretted": tally.regretted,
        "bytes_written": tally.written,
    }  # fmt: skip


def _compare(rows: Sequence[Row], ratios: bool) -> None:
    """Fill in the ratios, where all that they are of was replayed."""
    saved = {_point(row): row["seconds_saved"] for row in rows}
    for row in rows:
        _, *point = _point(row)
        classic = {name: saved[name, *point] for name in CLASSIC if (name, *point) in saved}
        offline = [saved[name, *point] for name in OFFLINE if (name, *point) in saved]
        best = max(classic, key=lambda name: classic[name]) if len(classic) == len(CLASSIC) else None
        row["best_classic"] = best
        row["ratio_to_best_classic"] = _ratio(row, classic[best]) if ratios and best else None
        row["ratio_to_belady"] = _ratio(row, max(offline)) if ratios and offline else None


def _ratio(row: Row, to: float) -> float | None:
    """None where there is nothing to compare with."""
    saved: float = row["seconds_saved"]
    return saved / to if to > 0.0 else None


def _point(row: Row) -> tuple[Any, ...]:
    return row["policy"], row["trace"], row["seed"], row["cache_fraction"]


def means(rows: Sequence[Row], column: str) -> dict[tuple[str, str, float], float]:
    """Means over seeds of a column, by trace, policy and cache fraction; points without the figure are left out."""
    found: dict[tuple[str, str, float], list[float]] = {}
    for row in rows:
        if row[column] is not None:
            found.setdefault((row["trace"], row["policy"], row["cache_fraction"]), []).append(row[column])
    return {point: float(np.mean(values)) for point, values in found.items()}


def missed(rows: Sequence[Row], policy: str = "market") -> list[str]:
    """A line per aim that the policy misses, in the mean over seeds."""
    lines = []
    for column in ("ratio_to_best_classic", "ratio_to_belady"):
        for (trace, name, fraction), ratio in means(rows, column).items():
            least = _least(trace, fraction, column)
            if name == policy and least is not None and ratio < least:
                lines.append(f"{trace} at {fraction:.0%}: {column} {ratio:.3f}, at least {least:g} is asked")
    return lines


def _least(trace: str, fraction: float, column: str) -> float | None:
    """The ratio that the market is to reach at a point; None where nothing is asked."""
    if column == "ratio_to_belady":
        return 0.85 if trace == "mixed" and fraction == 0.2 else None
    if trace == "mixed" and 0.02 <= fraction <= 0.1:
        return 1.3
    return 0.95 if trace.startswith("mislabelled") else 0.98
