"""Prometheus metrics of one server, in a registry of its own, under OpenMetrics names with units.

Every label has few values: outcomes and stages are fixed words, reasons are bounded by `Reasons`, stores are those of
the command line, routes those of the server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from blendkv.observe.collectors import IncludedCollector, StoreCollector, StoreFacts
from blendkv.observe.reuse import OUTCOMES, Reasons, Reuse

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
BUDGET_BUCKETS = (0.0, 0.01, 0.03, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0)
STAGES = ("queue", "retrieve", "prepare", "score", "load", "rotate", "recompute", "question", "decode")
"""Parts of a request's time that follow one another."""
KINDS = ("reused", "recomputed", "fresh", "generated")
_PREFILL = ("prepare", "score", "load", "rotate", "recompute", "question")
_SMOOTHING = 0.2
_LEAST_TOKENS = 128
"""Shorter prompts say little about what a token takes."""


class Metrics:
    """Counters, histograms and gauges of a server.

    Parameters
    ----------
    stores
        Returns a record per named store when the metrics are read; a store that cannot tell is left out.

    Attributes
    ----------
    registry
        prometheus_client's; nothing is registered globally.
    """

    def __init__(self, stores: Callable[[], Mapping[str, StoreFacts]]) -> None:
        self.registry = CollectorRegistry()
        self._reasons = Reasons()
        self._lock = threading.Lock()
        self._seconds_per_token: float | None = None
        self.requests = self._counter(
            "requests", "Requests that an engine answered or refused, by outcome; fallbacks by reason.",
            "outcome", "reason",
        )  # fmt: skip
        self.refused = self._counter(
            "refused_requests", "Requests that would have waited too long.", "workload", "reason"
        )
        self.waited = Histogram(
            "blendkv_queue_seconds", "Seconds that requests waited at the door, and what for.", ("workload", "reason"),
            unit="seconds", buckets=TTFT_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self.http = self._counter("http_requests", "HTTP requests by route and status.", "route", "status")
        self.running = Gauge("blendkv_requests_running", "Requests that are being served.", registry=self.registry)
        self.tokens = self._counter(
            "tokens", "Prompt tokens whose stored KV was used (reused), computed again (recomputed) or not there "
            "(fresh), and tokens that were generated.", "kind",
        )  # fmt: skip
        self.stages = self._counter("stage_seconds", "Seconds spent by stage.", "stage")
        self.avoided = self._counter(
            "prefill_avoided_seconds", "Estimate: what full prefill of the blended prompts would have taken."
        )
        self.spent = self._counter("prefill_spent_seconds", "What preparing and blending those prompts took instead.")
        self.saved = Gauge(
            "blendkv_prefill_saved_seconds", "Estimate: avoided minus spent; falls when a blend is slower.",
            unit="seconds", registry=self.registry,
        )  # fmt: skip
        self.budget = Histogram(
            "blendkv_budget_spent_ratio", "Fresh-QKV tokens over layers / (layers x reusable tokens), per blend.",
            unit="ratio", buckets=BUDGET_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self.ttft = Histogram(
            "blendkv_ttft_seconds", "Seconds from a request's arrival to its first token, the queue included.",
            ("outcome",), unit="seconds", buckets=TTFT_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._start_at_zero()
        self.registry.register(StoreCollector(stores))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        unit = "seconds" if name.endswith("_seconds") else ""
        return Counter(f"blendkv_{name}", text, labels, unit=unit, registry=self.registry)

    def _start_at_zero(self) -> None:
        """Show every known label from the start: a rate needs the sample before the first event."""
        for name in OUTCOMES:
            if name != "fallback":
                self.requests.labels(name, "")
        self.refused.labels("unknown", "overloaded")
        for kind in KINDS:
            self.tokens.labels(kind)
        for stage in STAGES:
            self.stages.labels(stage)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Learn from a full prefill what one takes: a moving average of seconds per token.

        Attention grows faster than the prompt, so that savings on prompts longer than those seen are estimated low.
        """
        with self._lock:
            rate, known = seconds / tokens, self._seconds_per_token
            self._seconds_per_token = rate if known is None else known + _SMOOTHING * (rate - known)

    def answered(self, reuse: Reuse, timings: Mapping[str, float], queued: float, generated: int) -> None:
        """Count an answer, with `blendkv.answer.Answer.timings` and the seconds that it waited for its turn."""
        self.requests.labels(reuse.name, self._reasons.label(reuse.reason)).inc()
        for kind, count in zip(KINDS, (reuse.reused, reuse.recomputed, reuse.fresh, generated), strict=True):
            self.tokens.labels(kind).inc(count)
        times = {**timings, "queue": queued, "decode": timings["total"] - timings["ttft"]}
        for stage in STAGES:
            self.stages.labels(stage).inc(max(0.0, times.get(stage, 0.0)))
        self.ttft.labels(reuse.name).observe(queued + timings["ttft"])
        prefill = sum(max(0.0, timings.get(stage, 0.0)) for stage in _PREFILL)
        prompt = reuse.reused + reuse.recomputed + reuse.fresh
        if reuse.budget_spent is None:
            if prompt >= _LEAST_TOKENS:  # 0 where the engine's own cache helped
                self.prefilled(prompt, prefill)
            return
        self.budget.observe(reuse.budget_spent)
        rate = self._seconds_per_token
        if reuse.name == "blended" and rate is not None:
            self.avoided.inc(prompt * rate)
            self.spent.inc(prefill)
            self.saved.inc(prompt * rate - prefill)

    def failed(self, outcome: str) -> None:
        """Count a request without an answer: ``error`` or ``cancelled``."""
        self.requests.labels(outcome, "").inc()

    def include(self, other: Collector) -> None:
        """Show another registry's metrics on the page too."""
        self.registry.register(IncludedCollector(other))

    def passed(self) -> None:
        """Count a plain request that the engine's own server answered; its tokens are in the engine's own metrics."""
        self.requests.labels("plain", "").inc()

    def page(self, accept: str) -> tuple[bytes, str]:
        """The metrics as text, and its content type: OpenMetrics if ``accept`` asks for it, else Prometheus text."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
