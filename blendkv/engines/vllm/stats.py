"""The connector's figures in vLLM's own statistics: its log line and its ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from blendkv.market.base import Use
from blendkv.market.classes import BUILT_IN

_FAMILIES = {
    "requests": ("vllm:blendkv_requests", "Requests by outcome: blended, prefix, plain, or why prefilled.", "outcome"),
    "workloads": ("vllm:blendkv_workload_requests", "Requests that asked for a blend, by workload.", "workload"),
    "tokens": ("vllm:blendkv_tokens", "Prompt tokens of blended requests: reused, recomputed, fresh.", "kind"),
    "seconds": ("vllm:blendkv_stage_seconds", "Seconds of blending by stage.", "stage"),
    "held": ("vllm:blendkv_held", "Requests held back for what they would have pushed out, by who uses it.", "reason"),
    "held_seconds": ("vllm:blendkv_held_seconds", "Seconds that requests were held back.", "reason"),
    "bytes": ("vllm:blendkv_loaded_bytes", "Bytes of stored KV taken in.", "source"),
}
"""By name in the statistics: the metric, its documentation, its label."""
_CLASSES = frozenset(known.name for known in BUILT_IN)
"""Workload classes that have a label of their own: words that clients make up must not become labels."""


class BlendStats(KVConnectorStats):
    """Sums since they were last taken: ``data[family][label]``; see ``_FAMILIES``."""

    def record(self, outcome: str, report: Mapping[str, Any], use: Use | None) -> None:
        """Add a finished request."""
        self.add("requests", outcome, 1)
        if use is not None:
            self.add("workloads", use.workload if use.workload in _CLASSES else "other", 1)
        if "reusable_tokens" not in report:
            return
        recomputed = report["recomputed_tokens"]
        self.add("tokens", "reused", report["reusable_tokens"] - recomputed)
        self.add("tokens", "recomputed", recomputed)
        self.add("tokens", "fresh", report["fresh_tokens"])
        self.add("bytes", "store", report["bytes_loaded"])
        for stage, seconds in report["stages"].items():
            self.add("seconds", stage, seconds)

    def add(self, family: str, label: str, amount: float) -> None:
        """Add to one sum."""
        sums = self.data.setdefault(family, {})
        sums[label] = sums.get(label, 0) + amount

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another interval's sums to these."""
        for family, sums in other.data.items():
            for label, amount in sums.items():
                self.add(family, label, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The sums, flat, for vLLM's log line."""
        return {f"{family} {label}": amount for family, sums in self.data.items() for label, amount in sums.items()}

    def reset(self) -> None:
        """Start a new interval."""
        self.data.clear()

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class BlendProm(KVConnectorPromMetrics):
    """The same sums as Prometheus counters, next to vLLM's own."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        counter = metric_types[Counter]
        self._counters = {
            family: counter(name=name, documentation=text, labelnames=[*labelnames, label])
            for family, (name, text, label) in _FAMILIES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's sums."""
        values = self.per_engine_labelvalues[engine_idx]
        for family, sums in transfer_stats_data.items():
            for label, amount in sums.items():
                self._counters[family].labels(*values, label).inc(amount)
