"""Which configurations get drafts, and why others do not."""

import sys
from types import SimpleNamespace

import pytest

from drafter_service.plugins.settings import PluginSettings
from drafter_service.plugins.vllm.__main__ import answer_of, main, report
from drafter_service.plugins.vllm.variants import (
    ASYNC_SCHEDULER,
    NETWORKS,
    PROPOSER,
    SCHEDULER,
    WORKER,
    Choice,
    Variant,
    check_version,
    choose_variant,
)
from drafter_service.stubs import drafter_pb2 as pb
from tests.drafter_service.fake_server import FakeService, fake_server_thread

V1 = {"scheduler_cls": SCHEDULER, "method": "custom_class", "model": PROPOSER}
V2 = {
    "scheduler_cls": SCHEDULER,
    "worker_cls": WORKER,
    "method": "ngram",
    "model": "ngram",
    "use_v2_model_runner": True,
}
ASYNC = {**V2, "scheduler_cls": ASYNC_SCHEDULER, "async_scheduling": True}
LAUNCHED = {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}  # TRL's colocated engines.


def config_of(values):
    """Return the parts of a `VllmConfig` that decide, with some values by the names that one of its parts has."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=SCHEDULER, async_scheduling=False),
        speculative_config=SimpleNamespace(
            method="custom_class", model=PROPOSER, draft_sample_method="greedy", enable_adaptive_verification=False
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, tensor_parallel_size=1, distributed_executor_backend="uni", worker_cls=""
        ),
        use_v2_model_runner=False,
    )
    parts = [config, config.scheduler_config, config.speculative_config, config.parallel_config]
    for name, value in values.items():
        (part,) = (each for each in parts if hasattr(each, name))
        setattr(part, name, value)
    if values.get("method") is None:
        config.speculative_config = None
    return config


@pytest.mark.parametrize(
    ("version", "values", "variant"),
    [
        ("0.32", V1, Variant.V1_SCHEDULER),
        ("0.33", V1, Variant.V1_SCHEDULER),
        *(("0.32", V1 | {"method": method, "model": "m"}, Variant.V1_SCHEDULER) for method in NETWORKS),
        ("0.33", V2, Variant.V2_SCHEDULER),
        ("0.33", ASYNC, Variant.V2_WORKER),
        *(("0.33", ASYNC | {"method": method, "model": "m"}, Variant.V2_WORKER) for method in NETWORKS),
        ("0.33", ASYNC | {"enable_adaptive_verification": True}, Variant.V2_WORKER),
        ("0.33", ASYNC | {"pipeline_parallel_size": 2}, Variant.V2_WORKER),
        ("0.33", V2 | {"pipeline_parallel_size": 2}, Variant.V2_SCHEDULER),
        # One worker drafts for all ranks, whoever launched them.
        ("0.33", ASYNC | LAUNCHED, Variant.V2_WORKER),
        ("0.32", {**V1, "distributed_executor_backend": "external_launcher"}, Variant.V1_SCHEDULER),
        ("0.32", V1 | LAUNCHED | {"distributed_executor_backend": "mp"}, Variant.V1_SCHEDULER),
    ],
)  # fmt: skip
def test_the_documented_flags_get_drafts(version, values, variant):
    assert choose_variant(version, config_of(values)).variant is variant


@pytest.mark.parametrize(
    ("version", "base", "change", "reason", "is_error"),
    [
        ("0.32", V1, {"scheduler_cls": None}, "the scheduler is vLLM's own; start vLLM with --scheduler-cls", False),
        ("0.32", V1, {"scheduler_cls": dict}, "the scheduler is builtins.dict; start", False),
        ("0.32", V1, {"method": None}, "there is no speculative decoding; start vLLM with", False),
        ("0.32", V1, {"method": None, "async_scheduling": True}, "there is no speculative decoding", True),
        ("0.32", V1, {"method": "ngram", "model": "ngram"}, "speculative decoding is ngram with ngram", False),
        ("0.32", V1, {"method": "dflash", "model": "m"}, "speculative decoding is dflash with m", False),
        ("0.32", V1, {"method": "eagle", "draft_sample_method": "probabilistic"}, "set it to greedy", False),
        ("0.32", V1, {"method": "eagle", "async_scheduling": True}, "add --no-async-scheduling", True),
        ("0.32", V1, {"async_scheduling": True}, "add --no-async-scheduling", True),
        ("0.32", V1, {"pipeline_parallel_size": 2}, "pipeline parallelism", False),
        ("0.32", V1, LAUNCHED, "set tensor_parallel_size to 1", True),
        ("0.32", V2, {}, "V2 model runner of vLLM 0.32 was not tested; set VLLM_USE_V2_MODEL_RUNNER=0", False),
        ("0.33", V2, {"worker_cls": "vllm.Worker"}, "the worker is vllm.Worker, whose V2 model runner takes no", False),
        ("0.33", V2, {"method": "mtp", "model": "m"}, "stay in the workers of the V2 model runner; start", False),
        ("0.33", V2, {"enable_adaptive_verification": True}, "is for asynchronous scheduling; remove it", False),
        ("0.33", ASYNC, {"method": "mtp", "draft_sample_method": "probabilistic"}, "set it to greedy", False),
        ("0.33", V2, {"use_v2_model_runner": False}, '"method": "custom_class"', False),
        ("0.33", V2, LAUNCHED, "set tensor_parallel_size to 1", True),
        ("0.33", V2, {"async_scheduling": True}, "the engine is asynchronous, and its scheduler is not; start", True),
        ("0.33", ASYNC, {"async_scheduling": False}, "the engine is synchronous, and its scheduler is not", True),
        ("0.33", V1, {"scheduler_cls": ASYNC_SCHEDULER}, "the engine is synchronous, and its scheduler is not", True),
    ],
)  # fmt: skip
def test_other_configurations_do_not_and_say_why(version, base, change, reason, is_error):
    choice = choose_variant(version, config_of(base | change))
    assert (choice.variant, choice.is_error) == (Variant.NONE, is_error)
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("is_adaptive", "words"), [(True, "each request verifies as many"), (False, "the same number")]
)
def test_the_reason_says_whether_each_request_has_its_own_length(is_adaptive, words):
    choice = choose_variant("0.33", config_of(ASYNC | {"enable_adaptive_verification": is_adaptive}))
    assert words in choice.reason


@pytest.mark.parametrize(
    ("version", "is_supported"),
    [("0.32.0", True), ("0.33.1+cpu", True), ("0.34.0", False), ("0.3.2", False), ("0.32.0.post1", False)],
)  # fmt: skip
def test_versions_that_were_not_tested_are_named(version, is_supported):
    choice = check_version(version)
    assert (choice is None) == is_supported
    if choice is not None:
        assert choice.reason == f"vLLM {version} was not tested, only 0.32, 0.33"


def test_the_report_says_what_happens(capsys):
    assert report(Choice(Variant.V1_SCHEDULER, "because")) == 0
    assert report(Choice(Variant.NONE, "because")) == 1
    assert report(Choice(Variant.NONE, "because", is_error=True)) == 1
    assert capsys.readouterr().out.splitlines()[::2] == [
        "drafts: in the scheduler of the V1 model runner",
        "drafts: none; it would serve without them",
        "drafts: none; the server would not start",
    ]


def test_the_command_explains_itself(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main(["--help"]) == main(["check", "--help"]) == 0
    assert main([]) == 2
    assert capsys.readouterr().out.count("usage:") == 3
    assert main(["check"]) == 1
    assert capsys.readouterr().out.endswith("run this in vLLM's environment\n")


def test_check_says_which_namespace_would_be_used_and_what_is_elsewhere(socket_address):
    settings = PluginSettings(socket_address, namespace="a")
    with fake_server_thread(socket_address, FakeService(held=pb.Held(tokens=5))):
        assert answer_of(settings) == "connected, namespace a (5 tokens)"
    with fake_server_thread(socket_address, FakeService(held=pb.Held(other="b"))):
        answer, warning = answer_of(settings).splitlines()
    assert answer == "connected, namespace a (0 tokens)"
    assert warning.startswith("warning: namespace a is empty, but namespace b holds text")
