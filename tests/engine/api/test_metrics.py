"""Metrics: vLLM's names, engine statistics, and measurements per request."""

from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.api import metrics as metrics_module
from engine.api.messages import CorpusSize, EngineStats
from engine.api.metrics import EngineCollector, Metrics, RequestRecorder, bucket_bounds
from engine.api.outputs import Delta
from engine.scheduling.request import Completion, FinishReason, Request

NAMES = {
    "gauge": {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "ssd:corpus_tokens",
        "ssd:drafter_off",
    },
    "counter": {
        "vllm:num_preemptions", "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits", "vllm:request_success", "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos", "ssd:engine_steps", "ssd:backoff_steps", "ssd:drafter_failures",
        "ssd:repeated_requests", "ssd:repeated_tokens", "ssd:learned_tokens", "ssd:draft_tokens", "ssd:accepted_tokens",
        "ssd:skipped_steps",
    },
    "histogram": {
        "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds",
        "vllm:request_prompt_tokens", "vllm:request_generation_tokens",
    },
}  # fmt: skip
"""vLLM's names, and our own."""
STATS = EngineStats(
    preemptions=3,
    backoff_steps=8,
    accepted_per_position=(5, 2),
    drafted_by_source={"corpus": 6, "local": 3},
    accepted_by_source={"corpus": 5, "local": 2},
    skipped_steps={"mtp": 4},
    drafter_failures=6,
    is_drafter_off=True,
    corpus=CorpusSize(7, 9),
)


def build(stats=STATS):
    return Metrics("tiny", EngineCollector("tiny", lambda: stats), max_tokens=1000)


def families(metrics):
    return list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))


def samples(metrics, name):
    """Values by labels, without the labels for model and engine."""
    return {
        tuple(value for label, value in sample.labels.items() if label not in ("model_name", "engine")): sample.value
        for family in families(metrics)
        for sample in family.samples
        if sample.name == name
    }


def value(metrics, name):
    [only] = samples(metrics, name).values()
    return only


@pytest.mark.parametrize("stats", [STATS, EngineStats(corpus=CorpusSize(0, 9))], ids=["busy", "before the first step"])
def test_names_kinds_and_labels_are_those_of_vllm(stats):
    named = {}
    for family in families(build(stats)):
        if family.name.endswith("_created"):
            continue
        named.setdefault(family.type, set()).add(family.name)
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"
    assert named == NAMES


def test_engine_statistics_are_exported():
    metrics = build()
    for name, expected in {
        "vllm:num_preemptions_total": {(): 3},
        "ssd:backoff_steps_total": {(): 8},
        "ssd:drafter_failures_total": {(): 6},
        "ssd:drafter_off": {(): 1},
        "ssd:corpus_tokens": {(): 7},
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": {("0",): 5, ("1",): 2},
        "ssd:draft_tokens_total": {("corpus",): 6, ("local",): 3},
        "ssd:accepted_tokens_total": {("corpus",): 5, ("local",): 2},
        "ssd:skipped_steps_total": {("mtp",): 4},
    }.items():
        assert samples(metrics, name) == expected, name


@pytest.mark.parametrize(
    ("name", "stats", "expected"),
    [
        ("ssd:corpus_tokens", EngineStats(), {}),
        ("ssd:drafter_connected", EngineStats(), {}),
        ("ssd:drafter_connected", EngineStats(is_connected=False), {(): 0}),
        ("ssd:drafter_connected", EngineStats(is_connected=True), {(): 1}),
    ],
)
def test_what_a_drafter_does_not_have_has_no_metric(name, stats, expected):
    assert samples(build(stats), name) == expected


def requests(count):
    return [Request(np.zeros(7, np.uint32))] * count


def end(index, tokens):
    completion = Completion(np.zeros(tokens, np.uint32), FinishReason.LENGTH, 1, 0, 0)
    return Delta(index, [], np.empty(0, np.uint32), completion=completion)


def some(index, tokens):
    return Delta(index, [], np.zeros(tokens, np.uint32))


def total(metrics, name):
    return value(metrics, f"vllm:{name}_count"), value(metrics, f"vllm:{name}_sum")


def test_measurements_of_one_request(monkeypatch):
    times = iter([10.0, 12.0, 15.0, 15.0])
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    metrics = build()
    recorder = RequestRecorder(metrics, requests(1))
    for delta in (some(0, 1), some(0, 3), end(0, 4)):
        recorder.record(delta)
    for name, expected in {
        "time_to_first_token_seconds": (1, 2),
        "inter_token_latency_seconds": (3, 3),
        "e2e_request_latency_seconds": (1, 5),
        "request_prompt_tokens": (1, 7),
        "request_generation_tokens": (1, 4),
    }.items():
        assert total(metrics, name) == expected, name
    assert samples(metrics, "vllm:request_success_total") == {("stop",): 0, ("length",): 1, ("abort",): 0}


def test_abandoned_outputs_are_counted_as_aborted():
    metrics = build()
    recorder = RequestRecorder(metrics, requests(3))
    recorder.record(end(1, 4))
    recorder.record_abort()
    assert samples(metrics, "vllm:request_success_total") == {("stop",): 0, ("length",): 1, ("abort",): 2}


def test_buckets_end_at_the_context_window():
    assert bucket_bounds(1000) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert bucket_bounds(19) == [1, 2, 5, 10]
