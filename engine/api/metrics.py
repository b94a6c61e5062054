"""Prometheus metrics under vLLM's names, so that its dashboards read them."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api.admission import Admission
from engine.api.generation import Delta
from engine.api.process import EngineProcess

ENGINE = "0"
LABELS = ("model_name", "engine")
FIRST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """What a server counts, and what its engine says."""

    def __init__(self, model: str, engine: EngineProcess, admission: Admission) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineFigures(model, engine, admission))
        labels = (model, ENGINE)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, LABELS, buckets=bounds, registry=self.registry).labels(*labels)

        self._first = histogram("vllm:time_to_first_token_seconds", "Until the first token.", FIRST_S)
        self._between = histogram("vllm:inter_token_latency_seconds", "Between tokens of one output.", BETWEEN_S)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Until the last token.", WHOLE_S)
        self._success = Counter(
            "vllm:request_success", "Requests by how they ended.", (*LABELS, "finished_reason"), registry=self.registry
        )
        self._labels = labels

    def watch(self) -> Watch:
        """To be told of the deltas of a request, from now on."""
        return Watch(self)

    def first_token(self, seconds: float) -> None:
        """An output began."""
        self._first.observe(seconds)

    def more_tokens(self, seconds: float, tokens: int) -> None:
        """Tokens came together, so long after those before them."""
        for _ in range(tokens):
            self._between.observe(seconds / tokens)

    def ended(self, seconds: float, reason: str) -> None:
        """An output is whole."""
        self._whole.observe(seconds)
        self._success.labels(*self._labels, reason).inc()


class Watch:
    """Times the outputs of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.perf_counter()
        self._last: dict[int, float] = {}

    def note(self, delta: Delta) -> None:
        """More of an output."""
        now = time.perf_counter()
        if len(delta.tokens):
            before = self._last.get(delta.index)
            if before is None:
                self._metrics.first_token(now - self._began)
            else:
                self._metrics.more_tokens(now - before, len(delta.tokens))
            self._last[delta.index] = now
        if delta.completion is not None:
            self._metrics.ended(now - self._began, delta.completion.finish_reason)


class _EngineFigures(Collector):
    """The engine's own figures at the time of a scrape."""

    def __init__(self, model: str, engine: EngineProcess, admission: Admission) -> None:
        self._labels = (model, ENGINE)
        self._engine = engine
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        figures = self._engine.figures
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that run.", figures.running),
            ("vllm:num_requests_waiting", "Requests that wait for the engine.", figures.waiting),
            ("vllm:kv_cache_usage_perc", "Part of the KV cache's pages that is in use, 1 for all.", figures.pages_used),
        ):
            yield self._gauge(name, text, value)
        for name, text, total in (
            ("vllm:prompt_tokens", "Tokens of prompts.", figures.prompt_tokens),
            ("vllm:generation_tokens", "Tokens of outputs.", figures.generated_tokens),
            ("vllm:prefix_cache_queries", "Tokens that were looked for in the prefix cache.", figures.prompt_tokens),
            ("vllm:prefix_cache_hits", "Tokens that were found there.", figures.cached_tokens),
            ("vllm:spec_decode_num_drafts", "Drafts that were verified.", figures.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted.", figures.drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", figures.accepted),
            ("ssd:engine_steps", "Steps of the engine.", figures.steps),
            ("ssd:refused_requests", "Requests that found no room.", self._admission.refused),
        ):
            yield self._counter(name, text, total)
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafted tokens by their position in the draft.",
            labels=(*LABELS, "position"),
        )
        for position, total in enumerate(figures.accepted_at):
            accepted.add_metric((*self._labels, str(position)), total)
        yield accepted

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family
