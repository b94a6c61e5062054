"""Prometheus metrics under vLLM's names: what the engine says of itself, and under `ssd:` what vLLM has no name for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.api.admission import Admission
from engine.api.messages import STEP_TOKENS, Figures
from engine.api.process import EngineProcess

ENGINE = "0"
LABELS = ("model_name", "engine")


class EngineMetrics(Collector):
    """The engine's figures at the time of a scrape."""

    def __init__(self, model: str, engine: EngineProcess, admission: Admission, cache: Mapping[str, object]) -> None:
        """cache: how the KV cache is set up, by vLLM's names of its settings."""
        self._labels = (model, ENGINE)
        self._engine = engine
        self._admission = admission
        self._cache = {name: str(value) for name, value in cache.items()}

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        figures = self._engine.figures
        yield from self._gauges(figures)
        yield from self._counters(figures)
        yield self._by(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafted tokens by their position in the draft.",
            "position",
            {str(position): total for position, total in enumerate(figures.accepted_at)},
        )
        yield self._by("ssd:draft_tokens", "Drafted tokens, by where they were found.", "source", figures.drafted_from)
        yield self._by(
            "ssd:accepted_tokens",
            "Those that were accepted, by where they were found.",
            "source",
            figures.accepted_from,
        )
        yield self._step_tokens(figures)

    def _gauges(self, figures: Figures) -> Iterator[Metric]:
        gauges = [
            ("vllm:num_requests_running", "Requests that run.", figures.running),
            ("vllm:num_requests_waiting", "Requests that wait for the engine.", figures.waiting),
            ("vllm:kv_cache_usage_perc", "Part of the KV cache's pages that is in use, 1 for all.", figures.pages_used),
        ]
        if figures.corpus is not None:
            gauges += [
                ("ssd:corpus_tokens", "Tokens of finished requests that are remembered.", figures.corpus.tokens),
                ("ssd:corpus_capacity_tokens", "The most that are.", figures.corpus.capacity),
            ]
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV cache is set up; always 1.", labels=(*LABELS, *self._cache)
        )
        info.add_metric((*self._labels, *self._cache.values()), 1)
        yield info

    def _counters(self, figures: Figures) -> Iterator[Metric]:
        for name, text, total in (
            ("vllm:num_preemptions", "Times that a request gave its pages back, to go on later.", figures.preemptions),
            ("vllm:prompt_tokens", "Tokens of prompts.", figures.prompt_tokens),
            ("vllm:generation_tokens", "Tokens of outputs.", figures.generated_tokens),
            ("vllm:prefix_cache_queries", "Tokens that were looked for in the prefix cache.", figures.prompt_tokens),
            ("vllm:prefix_cache_hits", "Tokens that were found there.", figures.cached_tokens),
            ("vllm:spec_decode_num_drafts", "Drafts that were verified.", figures.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted.", figures.drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", figures.accepted),
            ("ssd:engine_steps", "Steps of the engine.", figures.steps),
            ("ssd:learned_tokens", "Tokens of outputs that the drafter was given to remember.", figures.learned_tokens),
            ("ssd:refused_requests", "Requests that found no room.", self._admission.refused),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, total)
            yield counter

    def _by(self, name: str, text: str, label: str, totals: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for value, total in totals.items():
            family.add_metric((*self._labels, value), total)
        return family

    def _step_tokens(self, figures: Figures) -> Metric:
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens of prompts and outputs that a step completed.", labels=LABELS
        )
        # Before the engine's first word there is nothing to add up.
        counts = figures.step_tokens or (0,) * (len(STEP_TOKENS) + 1)
        bounds = [*(str(float(bound)) for bound in STEP_TOKENS), "+Inf"]
        family.add_metric(
            self._labels, list(zip(bounds, accumulate(counts), strict=True)), sum_value=figures.step_tokens_sum
        )
        return family
