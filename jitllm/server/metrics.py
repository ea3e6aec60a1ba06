"""`/metrics`: counters and histograms that requests feed, gauges that are read when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jitllm.paging.budget import rss_bytes

if TYPE_CHECKING:
    from jitllm.rows import RowFigures
    from jitllm.server.models import Model

OUTCOMES = ("ok", "cancelled", "refused", "failed")
"""Of a request for text: answered; given up by its client; a 4xx; a 5xx."""
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, models: Callable[[], list[Model]]):
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "jitllm_requests", "Requests for text", ["outcome"], registry=self.registry
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.tokens = Counter(
            "jitllm_tokens",
            "Tokens of prompts, of those restored from a cache, and of replies",
            ["kind"],
            registry=self.registry,
        )
        self.queue_s = self._histogram("queue_seconds", "Time that a request waited", _SECONDS)
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "From the request to its first token", _SECONDS
        )
        self.between_tokens_s = self._histogram(
            "inter_token_seconds", "Between two tokens of a reply", _STEPS
        )
        self.registry.register(_Gauges(models))

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    def count(self, outcome: str) -> None:
        """One more request ended so."""
        self.requests.labels(outcome).inc()

    def saw(self, figures: Iterable[RowFigures]) -> None:
        """A request with these replies has ended."""
        for row in figures:
            self.queue_s.observe(row.queue_s)
            self.tokens.labels("prompt").inc(row.prompt_tokens)
            self.tokens.labels("cached").inc(row.cached_tokens)
            self.tokens.labels("reply").inc(row.generated_tokens)

    def counts(self) -> dict[str, int]:
        """Requests by outcome."""
        samples = (s for metric in self.requests.collect() for s in metric.samples)
        return {s.labels["outcome"]: int(s.value) for s in samples if s.name.endswith("_total")}

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"jitllm_{name}", what, buckets=buckets, registry=self.registry)


class _Gauges(Collector):
    """Read from the engines at each scrape."""

    def __init__(self, models: Callable[[], list[Model]]):
        self._models = models

    def collect(self) -> Iterator[Metric]:
        rss = GaugeMetricFamily("jitllm_rss_bytes", "Bytes of the process in memory")
        rss.add_metric([], rss_bytes())
        yield rss
        yield from self._of_models()

    def _of_models(self) -> Iterator[Metric]:
        counters = {
            name: CounterMetricFamily(f"jitllm_{name}", what, labels=["model"])
            for name, what in (
                ("page_ins", "Pages read because a pass needed them"),
                ("evictions", "Pages that gave up their place"),
                ("read_bytes", "Bytes read from containers"),
            )
        }
        gauges = {
            name: GaugeMetricFamily(f"jitllm_{name}", what, labels=["model"])
            for name, what in (
                ("budget_bytes", "Budget for weights"),
                ("resident_bytes", "Weights in memory"),
                ("queued_requests", "Requests that wait"),
                ("active_rows", "Replies under way"),
            )
        }
        devices = GaugeMetricFamily(
            "jitllm_device_bytes", "Weights and KV on a device", labels=["model", "device"]
        )
        for model in self._models():
            stats, scheduler = model.engine.stats(), model.scheduler.stats
            values = {
                "page_ins": stats.counters.page_ins,
                "evictions": stats.counters.evictions,
                "read_bytes": stats.counters.bytes_read,
                "budget_bytes": stats.budget_bytes,
                "resident_bytes": stats.resident_bytes,
                "queued_requests": scheduler.n_queued,
                "active_rows": scheduler.n_prefilling + scheduler.n_decoding,
            }
            for name, family in (counters | gauges).items():
                family.add_metric([model.id], values[name])
            for each in model.engine.device_reports(stats, stats):
                devices.add_metric([model.id, each.device], each.weights_bytes + each.kv_bytes)
        yield from (*counters.values(), *gauges.values(), devices)
