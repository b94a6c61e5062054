"""Prometheus metrics under vLLM's names, so that its dashboards work; metrics of this project start with `ssd:`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_type_hints

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api.messages import CorpusSize, EngineStats
from engine.api.outputs import Delta
from engine.scheduling.request import FinishReason, Request

ENGINE = "0"
LABELS = ("model_name", "engine")

# Bucket bounds in seconds, the same as vLLM's.
FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("Time from the request to its first token.", FIRST_TOKEN_S),
    "vllm:inter_token_latency_seconds": ("Time between tokens of one output.", PER_TOKEN_S),
    "vllm:e2e_request_latency_seconds": ("Time from the request to its last token.", REQUEST_S),
}
TOKEN_HISTOGRAMS = {
    "vllm:request_prompt_tokens": "Tokens of the prompt.",
    "vllm:request_generation_tokens": "Tokens of the output.",
}


class Metrics:
    """All metrics of a server: those measured per request, and the engine's."""

    def __init__(self, model: str, collector: EngineCollector, max_tokens: int) -> None:
        """max_tokens: largest possible number of tokens of a prompt and its output together."""
        self.registry = CollectorRegistry()
        self.registry.register(collector)
        labels = (model, ENGINE)
        token_buckets = bucket_bounds(max_tokens)
        histograms = HISTOGRAMS | {name: (text, token_buckets) for name, text in TOKEN_HISTOGRAMS.items()}
        self.histograms = {
            name: Histogram(name, text, LABELS, buckets=bounds, registry=self.registry).labels(*labels)
            for name, (text, bounds) in histograms.items()
        }
        success = Counter(
            "vllm:request_success", "Requests by finish reason.", (*LABELS, "finished_reason"), registry=self.registry
        )
        # Create all series at start: `rate` misses the first event of a series that appears later.
        self.finished = {reason: success.labels(*labels, reason.value) for reason in FinishReason}


class RequestRecorder:
    """Records latencies and token counts of one HTTP request; times start at its creation."""

    def __init__(self, metrics: Metrics, requests: Sequence[Request]) -> None:
        self._metrics = metrics
        self._requests = requests
        self._began = time.perf_counter()
        self._last_token: dict[int, float] = {}
        self._ended = 0
        """Number of outputs that have ended."""

    def record(self, delta: Delta) -> None:
        """Record a delta that has just arrived."""
        now = time.perf_counter()
        self._ended += delta.completion is not None
        if delta.completion is not None and delta.completion.is_repeat:
            return  # The engine counts repeats; times and lengths describe requests that run.
        if len(delta.tokens):
            before = self._last_token.get(delta.index)
            if before is None:
                self._metrics.histograms["vllm:time_to_first_token_seconds"].observe(now - self._began)
            else:
                per_token = (now - before) / len(delta.tokens)
                for _ in range(len(delta.tokens)):
                    self._metrics.histograms["vllm:inter_token_latency_seconds"].observe(per_token)
            self._last_token[delta.index] = now
        if delta.completion is not None:
            self._metrics.histograms["vllm:e2e_request_latency_seconds"].observe(now - self._began)
            self._metrics.finished[delta.completion.finish_reason].inc()
            self._metrics.histograms["vllm:request_prompt_tokens"].observe(len(self._requests[delta.index].prompt))
            self._metrics.histograms["vllm:request_generation_tokens"].observe(len(delta.completion.tokens))

    def record_abort(self) -> None:
        """Count all outputs that have not ended as aborted."""
        for _ in range(len(self._requests) - self._ended):
            self._metrics.finished[FinishReason.ABORT].inc()


class EngineCollector(Collector):
    """Creates metrics from the engine's statistics at each scrape."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        """stats: returns the latest statistics."""
        self._labels = (model, ENGINE)
        self._stats = stats
        self._hints = get_type_hints(EngineStats, include_extras=True)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        stats = self._stats()
        for name, hint in self._hints.items():
            value = getattr(stats, name)
            for series in getattr(hint, "__metadata__", ()) if value is not None else ():
                of_kind = GaugeMetricFamily if series.kind == "gauge" else CounterMetricFamily
                family = of_kind(series.name, series.text, labels=[*LABELS, *filter(None, [series.label])])
                for labels, number in _numbers(value):
                    family.add_metric((*self._labels, *labels), number)
                yield family


def _numbers(value: Any) -> list[tuple[tuple[str, ...], float]]:
    """Return the numbers of a field of `EngineStats`, each with its labels."""
    if isinstance(value, CorpusSize):
        return [((), value.tokens)]
    if isinstance(value, dict | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [((str(key),), number) for key, number in pairs]
    return [((), value)]


def bucket_bounds(largest: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to `largest`."""
    powers = (10**power for power in range(len(str(largest))))
    return [float(bound) for power in powers for factor in (1, 2, 5) if (bound := factor * power) <= largest]
