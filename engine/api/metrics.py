"""Prometheus metrics under vLLM's names, so that its dashboards read them: what is measured at requests."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from engine.api.engine_metrics import ENGINE, LABELS, EngineMetrics
from engine.api.generation import Delta
from engine.api.messages import RequestTimes
from engine.scheduling.request import Completion, FinishReason, Request

FIRST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
PART_S = (0.001, 0.0025, 0.005, 0.01, 0.025, *WHOLE_S)
OUTPUTS = (1, 2, 5, 10, 20)
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("Until the first token.", FIRST_S),
    "vllm:inter_token_latency_seconds": ("Between tokens of one output.", BETWEEN_S),
    "vllm:request_time_per_output_token_seconds": ("For a token behind the first, of one output.", BETWEEN_S),
    "vllm:e2e_request_latency_seconds": ("Until the last token.", WHOLE_S),
    "vllm:request_queue_time_seconds": ("Until the request was scheduled.", PART_S),
    "vllm:request_inference_time_seconds": ("From there to the last token.", PART_S),
    "vllm:request_prefill_time_seconds": ("From there to the first token.", PART_S),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", PART_S),
    "vllm:request_params_n": ("Outputs that were asked for.", OUTPUTS),
}
TOKEN_HISTOGRAMS = {
    "vllm:request_prompt_tokens": "Tokens of the prompt.",
    "vllm:request_prefill_kv_computed_tokens": "Tokens of the prompt that were not in the prefix cache.",
    "vllm:request_generation_tokens": "Tokens of the output.",
    "vllm:request_max_num_generation_tokens": "Tokens of the longest output of a prompt.",
    "vllm:request_params_max_tokens": "Tokens that the output might have had.",
}


class Metrics:
    """What a server measures, beside what its engine says."""

    def __init__(self, model: str, engine: EngineMetrics, max_tokens: int) -> None:
        """max_tokens: of a prompt and its output together."""
        self.registry = CollectorRegistry()
        self.registry.register(engine)
        labels = (model, ENGINE)
        tokens = token_bounds(max_tokens)
        all_of_them = HISTOGRAMS | {name: (text, tokens) for name, text in TOKEN_HISTOGRAMS.items()}
        self._histograms = {
            name: Histogram(name, text, LABELS, buckets=bounds, registry=self.registry).labels(*labels)
            for name, (text, bounds) in all_of_them.items()
        }
        success = Counter(
            "vllm:request_success", "Requests by how they ended.", (*LABELS, "finished_reason"), registry=self.registry
        )
        # All of them from the start: rates of a series that appears late miss its first event.
        self._ends = {reason: success.labels(*labels, reason.value) for reason in FinishReason}

    def watch(self, requests: Sequence[Request], outputs: int) -> Watch:
        """To be told of the deltas of requests, from now on; each prompt has so many `outputs`, in a row."""
        return Watch(self, requests, outputs)

    def observe(self, name: str, value: float) -> None:
        """Add to the histogram `vllm:...`."""
        self._histograms[f"vllm:{name}"].observe(value)

    def ended(self, reason: FinishReason) -> None:
        """An output is over."""
        self._ends[reason].inc()


class Watch:
    """Measures the outputs of one HTTP request."""

    def __init__(self, metrics: Metrics, requests: Sequence[Request], outputs: int) -> None:
        self._metrics = metrics
        self._requests = requests
        self._outputs = outputs
        self._began = time.perf_counter()
        self._last: dict[int, float] = {}
        self._lengths: dict[int, int] = {}
        """Of the outputs that have ended."""

    def note(self, delta: Delta) -> None:
        """More of an output."""
        now = time.perf_counter()
        if len(delta.tokens):
            before = self._last.get(delta.index)
            if before is None:
                self._metrics.observe("time_to_first_token_seconds", now - self._began)
            else:
                for _ in range(len(delta.tokens)):
                    self._metrics.observe("inter_token_latency_seconds", (now - before) / len(delta.tokens))
            self._last[delta.index] = now
        if delta.completion is not None:
            self._metrics.observe("e2e_request_latency_seconds", now - self._began)
            self._end(delta.index, delta.completion, delta.times)

    def abandon(self) -> None:
        """Nobody wants the rest."""
        for _ in range(len(self._requests) - len(self._lengths)):
            self._metrics.ended(FinishReason.ABORT)

    def _end(self, index: int, completion: Completion, times: RequestTimes | None) -> None:
        observe, request, tokens = self._metrics.observe, self._requests[index], len(completion.tokens)
        self._metrics.ended(completion.finish_reason)
        observe("request_prompt_tokens", len(request.prompt))
        observe("request_generation_tokens", tokens)
        observe("request_params_max_tokens", request.sampling.max_tokens)
        if times is not None:
            observe("request_prefill_kv_computed_tokens", len(request.prompt) - completion.cached_tokens)
            observe("request_queue_time_seconds", times.queue)
            observe("request_prefill_time_seconds", times.prefill)
            observe("request_decode_time_seconds", times.decode)
            observe("request_inference_time_seconds", times.prefill + times.decode)
            if tokens > 1:
                observe("request_time_per_output_token_seconds", times.decode / (tokens - 1))
        self._lengths[index] = tokens
        self._end_prompt(index // self._outputs)

    def _end_prompt(self, prompt: int) -> None:
        """Measure what all outputs of a prompt have together, once they all have ended."""
        own = range(prompt * self._outputs, (prompt + 1) * self._outputs)
        if all(index in self._lengths for index in own):
            self._metrics.observe("request_params_n", self._outputs)
            self._metrics.observe("request_max_num_generation_tokens", max(self._lengths[index] for index in own))


def token_bounds(most: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 and so on, up to `most`."""
    powers = (10**power for power in range(len(str(most))))
    return [float(bound) for power in powers for factor in (1, 2, 5) if (bound := factor * power) <= most]
