"""Families of metrics that are read when the page is, in one table each: name, kind, help and labels.

Names stand without ``blendkv_``, and counters without ``_total``. A name's last word is its unit, where it has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

_UNITS = ("bytes", "seconds")


@dataclass(frozen=True)
class Family:
    """What a metric says, and its labels in the order of the samples."""

    kind: Literal["gauge", "counter", "histogram"]
    text: str
    labels: tuple[str, ...]

    def empty(self, name: str) -> GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily:
        """The family without samples."""
        word = name.rsplit("_", 1)[-1]
        unit = word if word in _UNITS else ""
        made = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
        return made[self.kind](f"blendkv_{name}", self.text, labels=self.labels, unit=unit)


@dataclass(frozen=True)
class Distribution:
    """A histogram's value: (upper bound, values up to it) with ``+Inf`` last, and the sum of all values."""

    buckets: Sequence[tuple[str, float]]
    total: float


Sample: TypeAlias = tuple[str, tuple[str, ...], float | Distribution]
"""Name of a family, the values of its labels, and the value."""


def gauge(text: str, *labels: str) -> Family:
    """What is so now."""
    return Family("gauge", text, labels)


def counter(text: str, *labels: str) -> Family:
    """What has happened since the process was started."""
    return Family("counter", text, labels)


def histogram(text: str, *labels: str) -> Family:
    """How values are distributed."""
    return Family("histogram", text, labels)


def filled(table: Mapping[str, Family], samples: Iterable[Sample] = ()) -> Iterable[Metric]:
    """All families of ``table``, with ``samples`` in them."""
    families = {name: family.empty(name) for name, family in table.items()}
    for name, labels, value in samples:
        family = families[name]
        if isinstance(value, Distribution):
            assert isinstance(family, HistogramMetricFamily)
            family.add_metric(labels, value.buckets, value.total)
        else:
            assert not isinstance(family, HistogramMetricFamily)
            family.add_metric(labels, value)
    return families.values()
