"""Metrics: their names, which are vLLM's, and what is measured at requests."""

from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.api import metrics as metrics_module
from engine.api.admission import Admission
from engine.api.engine_metrics import EngineMetrics
from engine.api.generation import Delta
from engine.api.messages import CorpusFigures, Figures, RequestTimes
from engine.api.metrics import Metrics, token_bounds
from engine.scheduling.request import Completion, FinishReason, Request, SamplingParams

OF_VLLM = {
    "gauge": {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
    },
    "counter": {
        "vllm:num_preemptions",
        "vllm:prompt_tokens",
        "vllm:generation_tokens",
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:request_success",
        "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
    },
    "histogram": {
        "vllm:iteration_tokens_total",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_inference_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:request_max_num_generation_tokens",
        "vllm:request_prefill_kv_computed_tokens",
        "vllm:request_params_n",
        "vllm:request_params_max_tokens",
    },
}
OWN = {
    "gauge": {"ssd:corpus_tokens", "ssd:corpus_capacity_tokens"},
    "counter": {
        "ssd:engine_steps",
        "ssd:learned_tokens",
        "ssd:refused_requests",
        "ssd:draft_tokens",
        "ssd:accepted_tokens",
    },
}
FIGURES = Figures(
    preemptions=3,
    step_tokens=(2, 1, *[0] * 11, 4),
    step_tokens_sum=80_000,
    accepted_at=(5, 2),
    drafted_from={"corpus": 6, "local": 3},
    accepted_from={"corpus": 5, "local": 2},
    corpus=CorpusFigures(7, 9),
)


def build(figures=FIGURES):
    engine = SimpleNamespace(figures=figures)
    return Metrics("tiny", EngineMetrics("tiny", engine, Admission(1), {"block_size": 16}), max_tokens=1000)


def families(metrics):
    return list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))


def samples(metrics, name):
    """Values by the labels that not all samples have."""
    return {
        tuple(value for label, value in sample.labels.items() if label not in ("model_name", "engine")): sample.value
        for family in families(metrics)
        for sample in family.samples
        if sample.name == name
    }


def value(metrics, name):
    [only] = samples(metrics, name).values()
    return only


@pytest.mark.parametrize("figures", [FIGURES, Figures(corpus=CorpusFigures(0, 9))], ids=["at work", "before all"])
def test_names_kinds_and_labels_are_those_of_vllm(figures):
    named = {}
    for family in families(build(figures)):
        if family.name.endswith("_created"):
            continue
        named.setdefault(family.type, set()).add(family.name)
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"
    assert named == {kind: names | OWN.get(kind, set()) for kind, names in OF_VLLM.items()}


def test_what_the_engine_says():
    metrics = build()
    assert value(metrics, "vllm:num_preemptions_total") == 3
    assert samples(metrics, "vllm:spec_decode_num_accepted_tokens_per_pos_total") == {("0",): 5, ("1",): 2}
    assert samples(metrics, "ssd:draft_tokens_total") == {("corpus",): 6, ("local",): 3}
    assert samples(metrics, "ssd:accepted_tokens_total") == {("corpus",): 5, ("local",): 2}
    assert samples(metrics, "vllm:cache_config_info") == {("16",): 1}
    steps = samples(metrics, "vllm:iteration_tokens_total_bucket")
    assert (steps["1.0",], steps["8.0",], steps["16384.0",], steps["+Inf",]) == (2, 3, 3, 7)
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 80_000


def test_a_drafter_without_a_corpus_here_has_no_figures_of_one():
    assert samples(build(Figures()), "ssd:corpus_tokens") == {}


def requests(count, prompt=7, max_tokens=40):
    return [Request(np.zeros(prompt, np.uint32), SamplingParams(max_tokens=max_tokens))] * count


def end(index, tokens, times=RequestTimes(1, 2, 6), cached=3):  # noqa: B008
    completion = Completion(np.zeros(tokens, np.uint32), FinishReason.LENGTH, 1, 0, 0, cached_tokens=cached)
    return Delta(index, [], np.empty(0, np.uint32), completion=completion, times=times)


def some(index, tokens):
    return Delta(index, [], np.zeros(tokens, np.uint32))


def total(metrics, name):
    return value(metrics, f"vllm:{name}_count"), value(metrics, f"vllm:{name}_sum")


def test_what_is_measured_at_a_request(monkeypatch):
    moments = iter([10.0, 12.0, 15.0, 15.0])
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    metrics = build()
    watch = metrics.watch(requests(1), 1)
    for delta in (some(0, 1), some(0, 3), end(0, 4)):
        watch.note(delta)
    for name, expected in {
        "time_to_first_token_seconds": (1, 2),
        "inter_token_latency_seconds": (3, 3),
        "e2e_request_latency_seconds": (1, 5),
        "request_queue_time_seconds": (1, 1),
        "request_prefill_time_seconds": (1, 2),
        "request_decode_time_seconds": (1, 6),
        "request_inference_time_seconds": (1, 8),
        "request_time_per_output_token_seconds": (1, 2),
        "request_prompt_tokens": (1, 7),
        "request_prefill_kv_computed_tokens": (1, 4),
        "request_generation_tokens": (1, 4),
        "request_params_max_tokens": (1, 40),
        "request_params_n": (1, 1),
    }.items():
        assert total(metrics, name) == expected, name
    assert samples(metrics, "vllm:request_success_total") == {("stop",): 0, ("length",): 1, ("abort",): 0}


def test_what_outputs_of_one_prompt_have_together():
    metrics = build()
    watch = metrics.watch(requests(4), 2)
    for index, tokens in ((0, 5), (3, 30), (2, 20)):
        watch.note(end(index, tokens))
    assert total(metrics, "request_params_n") == (1, 2)
    assert total(metrics, "request_max_num_generation_tokens") == (1, 30)
    watch.note(end(1, 9))
    assert total(metrics, "request_params_n") == (2, 4)
    assert total(metrics, "request_max_num_generation_tokens") == (2, 39)


def test_an_output_that_was_kept_took_no_time_of_the_engine():
    metrics = build()
    metrics.watch(requests(1), 1).note(end(0, 4, times=None))
    assert total(metrics, "request_generation_tokens") == (1, 4)
    assert total(metrics, "request_queue_time_seconds") == (0, 0)


def test_what_nobody_waits_for_any_more_is_counted():
    metrics = build()
    watch = metrics.watch(requests(3), 3)
    watch.note(end(1, 4))
    watch.abandon()
    assert samples(metrics, "vllm:request_success_total") == {("stop",): 0, ("length",): 1, ("abort",): 2}


def test_bounds_rise_to_the_context_window():
    assert token_bounds(1000) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert token_bounds(19) == [1, 2, 5, 10]
