"""Figures for Prometheus. What the engines count anyway is read when somebody asks; nothing is done per token.

Labels are bounded: registered models, the routes' templates, our own error codes. docs/operations.md lists the names.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mlxinfer.engine.governor import governor
from mlxinfer.pool.entries import State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from mlxinfer.pool import ModelPool
    from mlxinfer.server.record import RequestRecord
    from mlxinfer.types import Timings, Usage

METHODS = frozenset({"GET", "POST", "OPTIONS", "HEAD", "PUT", "PATCH", "DELETE"})
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
STATS = {
    "prompt_tokens": "Prompt tokens of the model's requests, cached ones included.",
    "cached_tokens": "Prompt tokens that were not computed again.",
    "generated_tokens": "Tokens generated.",
    "steps": "Steps of the engine; generated tokens per step is the mean batch.",
    "failed_steps": "Steps that failed.",
}
"""What an engine counts since it was loaded. An unloaded model has no such series."""


class ServerMetrics:
    """The figures of one server, in a registry of their own."""

    def __init__(self, models: ModelPool) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=False)
        registry.register(_Engines(models))
        self._http = Counter(
            "mlxinfer_http_requests", "Requests by route and status.", ("route", "method", "code"), registry=registry
        )
        self._http_seconds = Histogram(
            "mlxinfer_http_request_seconds",
            "Time from a request's headers to the end of its answer.",
            ("route",),
            buckets=SECONDS,
            registry=registry,
        )
        self._errors = Counter("mlxinfer_errors", "Requests that failed, by error code.", ("code",), registry=registry)
        self._refusals = Counter(
            "mlxinfer_refusals", "Requests refused before they reached a route.", ("kind",), registry=registry
        )
        self._aborted = Counter(
            "mlxinfer_aborted_requests", "Requests whose client left before the answer's end.", registry=registry
        )
        self._ended = Counter(
            "mlxinfer_generations", "Choices that ended, by reason.", ("model", "reason"), registry=registry
        )
        self._queue = self._seconds("queue", "Time before the first work on a request.", SECONDS)
        self._ttft = self._seconds("time_to_first_token", "Time from submission to the first token.", SECONDS)
        self._itl = self._seconds("inter_token_latency", "Mean time between tokens of a request.", TOKEN_SECONDS)
        self._total = self._seconds("generation", "Time from submission to the last token.", SECONDS)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"mlxinfer_{name}_seconds", text, ("model",), buckets=buckets, registry=self.registry)

    def observe_request(self, model: str, usage: Usage, timings: Timings | None, reason: str) -> None:
        """A choice of a registered model ended. `reason` is one of a few words: stop, length, tool_calls, …"""
        self._ended.labels(model, reason).inc()
        if timings is None:
            return
        self._queue.labels(model).observe(timings.queue_s)
        self._ttft.labels(model).observe(timings.ttft_s)
        self._total.labels(model).observe(timings.total_s)
        if usage.completion_tokens > 1:
            self._itl.labels(model).observe((timings.total_s - timings.ttft_s) / (usage.completion_tokens - 1))

    def observe_http(self, route: str, method: str, record: RequestRecord) -> None:
        """A request was answered, or its client left."""
        code = str(record.status) if record.status is not None else "none"
        self._http.labels(route, method if method in METHODS else "other", code).inc()
        self._http_seconds.labels(route).observe(time.perf_counter() - record.start)
        if record.error is not None:
            self._errors.labels(record.error).inc()
        if record.left:
            self._aborted.inc()

    def refused(self, kind: str) -> None:
        """A request was refused for who sent it, how, or how often."""
        self._refusals.labels(kind).inc()


class _Engines(Collector):
    """Reads the pool, its engines and the governor."""

    def __init__(self, models: ModelPool) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        status = self._models.status()
        state = _gauge("model_state", "1 for the state a model is in.", "model", "state")
        running = _gauge("requests_running", "Requests in the batch.", "model")
        waiting = _gauge("requests_waiting", "Requests that wait for the batch, or for the model to load.", "model")
        for name, one in status.items():
            for word in get_args(State):
                state.add_metric((name, word), float(one.state == word))
            running.add_metric((name,), one.running)
            waiting.add_metric((name,), one.waiting)
        yield from (state, running, waiting)
        yield from self._stats()
        figures = governor().figures()
        memory = _gauge("memory_bytes", "Memory by use, of all models.", "use")
        for use in ("budget", "weights", "kv", "prefix_cache"):
            memory.add_metric((use,), getattr(figures, use))
        yield memory

    def _stats(self) -> Iterator[Metric]:
        loaded = {name: held.stats() for name in self._models if (held := self._models.model(name)) is not None}
        for key, text in STATS.items():
            counter = CounterMetricFamily(f"mlxinfer_{key}", text, labels=("model",))
            for name, stats in loaded.items():
                counter.add_metric((name,), stats.get(key, 0))
            yield counter
        for key, text in (("kv_bytes", "Contexts of running requests."), ("prefix_bytes", "Idle prefixes in memory.")):
            gauge = _gauge(key, text, "model")
            for name, stats in loaded.items():
                gauge.add_metric((name,), stats.get(key, 0))
            yield gauge


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"mlxinfer_{name}", text, labels=labels)
