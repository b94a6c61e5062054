"""Prometheus metrics under vLLM's names, so that its dashboards work; metrics of this project start with `ssd:`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api.messages import EngineStats, RequestTimes
from engine.api.outputs import Delta
from engine.scheduling.request import Completion, FinishReason, Request

ENGINE = "0"
LABELS = ("model_name", "engine")

# Bucket bounds in seconds, the same as vLLM's.
FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
PHASE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, *REQUEST_S)
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("Time from the request to its first token.", FIRST_TOKEN_S),
    "vllm:inter_token_latency_seconds": ("Time between tokens of one output.", PER_TOKEN_S),
    "vllm:e2e_request_latency_seconds": ("Time from the request to its last token.", REQUEST_S),
    "vllm:request_queue_time_seconds": ("Time until the request was scheduled.", PHASE_S),
    "vllm:request_prefill_time_seconds": ("Time from scheduling to the first token.", PHASE_S),
    "vllm:request_decode_time_seconds": ("Time from the first token to the last.", PHASE_S),
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
        self._histograms = {
            name: Histogram(name, text, LABELS, buckets=bounds, registry=self.registry).labels(*labels)
            for name, (text, bounds) in histograms.items()
        }
        success = Counter(
            "vllm:request_success", "Requests by finish reason.", (*LABELS, "finished_reason"), registry=self.registry
        )
        # Create all series at start: `rate` misses the first event of a series that appears later.
        self._finished = {reason: success.labels(*labels, reason.value) for reason in FinishReason}

    def observe(self, name: str, value: float) -> None:
        """Add a value to the histogram `vllm:<name>`."""
        self._histograms[f"vllm:{name}"].observe(value)

    def count_finished(self, reason: FinishReason) -> None:
        """Count an output that has ended."""
        self._finished[reason].inc()


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
                self._metrics.observe("time_to_first_token_seconds", now - self._began)
            else:
                for _ in range(len(delta.tokens)):
                    self._metrics.observe("inter_token_latency_seconds", (now - before) / len(delta.tokens))
            self._last_token[delta.index] = now
        if delta.completion is not None:
            self._metrics.observe("e2e_request_latency_seconds", now - self._began)
            self._record_end(delta.index, delta.completion, delta.times)

    def record_abort(self) -> None:
        """Count all outputs that have not ended as aborted."""
        for _ in range(len(self._requests) - self._ended):
            self._metrics.count_finished(FinishReason.ABORT)

    def _record_end(self, index: int, completion: Completion, times: RequestTimes | None) -> None:
        observe = self._metrics.observe
        self._metrics.count_finished(completion.finish_reason)
        observe("request_prompt_tokens", len(self._requests[index].prompt))
        observe("request_generation_tokens", len(completion.tokens))
        if times is not None:
            observe("request_queue_time_seconds", times.queue)
            observe("request_prefill_time_seconds", times.prefill)
            observe("request_decode_time_seconds", times.decode)


class EngineCollector(Collector):
    """Creates metrics from the engine's statistics at each scrape."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]) -> None:
        """stats: returns the latest statistics."""
        self._labels = (model, ENGINE)
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        stats = self._stats()
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield self._labeled_counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in the draft.",
            "position",
            {str(position): total for position, total in enumerate(stats.accepted_per_position)},
        )
        yield self._labeled_counter(
            "ssd:draft_tokens", "Draft tokens by the source that proposed them.", "source", stats.drafted_by_source
        )
        yield self._labeled_counter(
            "ssd:accepted_tokens", "Accepted draft tokens by source.", "source", stats.accepted_by_source
        )
        yield self._labeled_counter(
            "ssd:skipped_steps",
            "Engine steps in which a drafter of a combination was not called, because the others offered more.",
            "drafter",
            stats.skipped_steps,
        )

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        gauges = [
            ("vllm:num_requests_running", "Running requests.", stats.running),
            ("vllm:num_requests_waiting", "Waiting requests.", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV cache's pages in use, 1 for all.", stats.kv_usage),
            ("ssd:drafter_off", "1 if the drafter is switched off after repeated failures.", int(stats.is_drafter_off)),
        ]
        if stats.corpus is not None:
            gauges.append(("ssd:corpus_tokens", "Tokens in the corpus.", stats.corpus.tokens))
        if stats.is_connected is not None:
            text = "1 if the remote drafter was connected after the last step, else 0."
            gauges.append(("ssd:drafter_connected", text, int(stats.is_connected)))
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, total in (
            ("vllm:num_preemptions", "Requests whose pages were freed, to be computed again later.", stats.preemptions),
            ("vllm:prompt_tokens", "Prompt tokens.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Output tokens.", stats.generated_tokens),
            ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prompt_tokens),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", stats.cached_tokens),
            ("vllm:spec_decode_num_drafts", "Verified drafts.", stats.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Verified draft tokens.", stats.drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", stats.accepted),
            ("ssd:engine_steps", "Engine steps.", stats.steps),
            ("ssd:backoff_steps", "Engine steps without drafting, because it was not worthwhile.", stats.backoff_steps),
            ("ssd:repeated_requests", "Requests answered from the corpus, not run.", stats.repeated_requests),
            ("ssd:repeated_tokens", "Output tokens of requests answered from the corpus.", stats.repeated_tokens),
            ("ssd:drafter_failures", "Failed calls of the drafter, and its invalid drafts.", stats.drafter_failures),
            ("ssd:learned_tokens", "Output tokens passed to the drafter to remember.", stats.learned_tokens),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, total)
            yield counter

    def _labeled_counter(self, name: str, text: str, label: str, totals: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for value, total in totals.items():
            family.add_metric((*self._labels, value), total)
        return family


def bucket_bounds(largest: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to `largest`."""
    powers = (10**power for power in range(len(str(largest))))
    return [float(bound) for power in powers for factor in (1, 2, 5) if (bound := factor * power) <= largest]
