"""Prometheus metrics of one server; names follow SGLang's pattern with our prefix.

Rule for tokens: ``neoserve:prompt_tokens_total`` and ``neoserve:generation_tokens_total`` count what the engine
computed, ``neoserve:cached_tokens_total`` prompt tokens that it found in the prefix cache instead, aborted requests
included. The per-request histograms are observed once per engine request, when it ends in
whatever way, with the tokens that reached the HTTP layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from neoserve.types.request import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each, that nobody reads


_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 5)
_TOKEN_COUNT_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("neoserve:num_running_reqs", "Requests being prefilled or decoded", lambda s: s.running),
    ("neoserve:num_queue_reqs", "Requests waiting to be admitted", lambda s: s.waiting),
    ("neoserve:token_usage", "Share of KV pages in use, 0 to 1", lambda s: s.used_pages / max(s.total_pages, 1)),
    ("neoserve:num_used_pages", "KV pages that running requests hold or read", lambda s: s.used_pages),
    ("neoserve:num_evictable_pages", "KV pages that only the prefix cache keeps", lambda s: s.evictable_pages),
    ("neoserve:num_total_pages", "KV pages of the pool: used, evictable and free", lambda s: s.total_pages),
    (
        "neoserve:cache_hit_rate",
        "Share of prompt tokens since the start that were found in the prefix cache, 0 to 1",
        lambda s: s.cached_tokens / max(s.cached_tokens + s.prompt_tokens, 1),
    ),
    ("neoserve:num_threads", "Compute threads; GET /v1/models says why so many", lambda s: s.threads),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("neoserve:prompt_tokens", "Prompt tokens computed", lambda s: s.prompt_tokens),
    ("neoserve:cached_tokens", "Prompt tokens found in the prefix cache", lambda s: s.cached_tokens),
    ("neoserve:evicted_pages", "KV pages that left the prefix cache to make room", lambda s: s.evicted_pages),
    ("neoserve:generation_tokens", "Tokens generated", lambda s: s.generated_tokens),
    ("neoserve:num_steps", "Engine steps", lambda s: s.steps),
    ("neoserve:num_preemptions", "Running requests put back into the queue", lambda s: s.preemptions),
    ("neoserve:row_fallbacks", "Ops that ran on a slower kernel row than planned", lambda s: s.row_fallbacks),
)


class _EngineCollector(Collector):
    """Reads the engine's statistics at scrape time, so that the engine counts nothing twice."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self._model = model
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        labels = [self._model]
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(labels, value(stats))
            yield gauge
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(labels, value(stats))
            yield counter
        seconds = CounterMetricFamily("neoserve:step_seconds", "Time in engine steps", labels=["model_name", "phase"])
        for phase, value_s in sorted(stats.step_seconds.items()):
            seconds.add_metric([self._model, phase], value_s)
        yield seconds


class Metrics:
    """All metrics of one served model, in a registry of its own."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(model, stats))
        self._model = model

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, ["model_name"], buckets=buckets, registry=self.registry)
            child = family.labels(model)
            assert isinstance(child, Histogram)
            return child

        self.time_to_first_token = histogram(
            "neoserve:time_to_first_token_seconds", "From arrival to the first token", _LATENCY_BUCKETS
        )
        self.inter_token_latency = histogram(
            "neoserve:inter_token_latency_seconds", "Between tokens of a request", _TOKEN_LATENCY_BUCKETS
        )
        self.e2e_request_latency = histogram(
            "neoserve:e2e_request_latency_seconds", "From arrival to the last token", _LATENCY_BUCKETS
        )
        self.request_prompt_tokens = histogram(
            "neoserve:request_prompt_tokens", "Prompt tokens of a request", _TOKEN_COUNT_BUCKETS
        )
        self.request_generation_tokens = histogram(
            "neoserve:request_generation_tokens", "Generated tokens of a request", _TOKEN_COUNT_BUCKETS
        )
        self._requests = Counter(
            "neoserve:num_requests",
            "Ended requests by finish reason: stop, length, abort, error",
            ["model_name", "finish_reason"],
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._requests.labels(model, reason)
        aborted = Counter(
            "neoserve:num_aborted_requests", "Requests given up early", ["model_name"], registry=self.registry
        )
        self._aborted = aborted.labels(model)

    def render(self) -> bytes:
        """The exposition text of a scrape."""
        return generate_latest(self.registry)

    def timer(self, prompt_tokens: int) -> RequestTimer:
        """Starts the clock of one engine request."""
        return RequestTimer(self, prompt_tokens)

    def ended(self, reason: str) -> None:
        """Counts one ended request."""
        self._requests.labels(self._model, reason).inc()
        if reason == "abort":
            self._aborted.inc()


@dataclass(slots=True)
class RequestTimer:
    """Times of one engine request; ``finish`` counts once, further calls do nothing."""

    metrics: Metrics
    prompt_tokens: int
    start: float = field(default_factory=time.perf_counter)
    last: float | None = None
    tokens: int = 0
    done: bool = False

    def record(self, tokens: int) -> None:
        """``tokens`` arrived in one step."""
        if tokens == 0:
            return
        now = time.perf_counter()
        if self.last is None:
            self.metrics.time_to_first_token.observe(now - self.start)
        else:
            for _ in range(tokens):
                self.metrics.inter_token_latency.observe((now - self.last) / tokens)
        self.last = now
        self.tokens += tokens

    def discard(self) -> None:
        """The engine did not take the request: it is counted nowhere."""
        self.done = True

    def finish(self, reason: str) -> None:
        """The request ended with ``reason``."""
        if self.done:
            return
        self.done = True
        self.metrics.ended(reason)
        self.metrics.request_prompt_tokens.observe(self.prompt_tokens)
        self.metrics.request_generation_tokens.observe(self.tokens)
        if reason in ("stop", "length"):
            self.metrics.e2e_request_latency.observe(time.perf_counter() - self.start)
