"""What the parts of `bench market` share: policies and traces by name, and processes to replay them in."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from blendkv.errors import InputError
from blendkv.eval.bench.market_checks import Make
from blendkv.market.base import EvictionPolicy
from blendkv.market.belady import BeladyCostPolicy, BeladyPolicy
from blendkv.market.costs import CostModel
from blendkv.market.generate import LENGTH, TRACES, generate
from blendkv.market.policies import POLICIES
from blendkv.market.trace import Trace, read_mooncake

CLASSIC = ("lru", "lfu", "gdsf", "lhd", "arc")
"""The best of these, at a point, is the best classic policy there."""
OFFLINE: Mapping[str, Callable[[Iterable[tuple[float, str]]], EvictionPolicy]] = {
    "belady": BeladyPolicy, "belady-cost": BeladyCostPolicy,
}  # fmt: skip
"""Policies that know the future: the better one, at a point, is the bound there."""

T = TypeVar("T")
R = TypeVar("R")


def all_policies() -> tuple[str, ...]:
    """Every name that `maker` knows."""
    return (*POLICIES.names(), *OFFLINE)


def check_policies(names: Sequence[str]) -> None:
    """Refuse names that `maker` does not know.

    Raises
    ------
    InputError
        If there is one; the message lists those that are known.
    """
    for name in names:
        if name not in all_policies():
            raise InputError(f"unknown eviction policy {name!r}; allowed: {', '.join(all_policies())}")


def maker(name: str) -> Make:
    """Makes the policy called ``name``, given bytes and the trace that it will see."""
    if name in OFFLINE:
        offline = OFFLINE[name]
        return lambda capacity, trace: offline(trace.uses())
    made = POLICIES.get(name)
    return lambda capacity, trace: made(capacity)


@lru_cache(maxsize=2)
def load_trace(name: str, seed: int | None, length: int, rate: float) -> Trace:
    """Generate a trace, or read a file, of which a length other than the default takes the first requests.

    Raises
    ------
    InputError
        If there is no such trace, or the file is not in Mooncake's format.
    """
    if seed is None:
        return read_mooncake(Path(name), None if length == LENGTH else length)
    return generate(name, seed, length, rate)


def engines(trace: Trace, costs: CostModel) -> int:
    """As many servers as can bear a trace without any cache."""
    work = sum(costs.prefill(0, request.tokens) for request in trace.requests)
    return max(1, math.ceil(work / trace.span)) if trace.span > 0.0 else 1


def is_generated(trace: str) -> bool:
    """Whether a trace is generated, or a file.

    Raises
    ------
    InputError
        If there is neither.
    """
    if trace in TRACES.names():
        return True
    if Path(trace).is_file():
        return False
    raise InputError(f"unknown trace {trace!r}; allowed: {', '.join(TRACES.names())}, or a file in Mooncake's format")


def spread(work: Callable[[T], R], tasks: Sequence[T], jobs: int) -> Iterator[R]:
    """Results in the order of the tasks, which share ``jobs`` processes."""
    if jobs == 1:
        yield from map(work, tasks)
        return
    # A fresh interpreter each: threads of this one, torch's for instance, do not survive a fork.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(work, tasks)
