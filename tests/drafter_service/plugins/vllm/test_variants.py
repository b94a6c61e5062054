"""Which configurations get drafts, and why others do not."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from drafter_service.plugins.vllm.__main__ import main, report
from drafter_service.plugins.vllm.variants import (
    ASYNC_SCHEDULER,
    PROPOSER,
    SCHEDULER,
    WORKER,
    Choice,
    HostFacts,
    Variant,
    check_version,
    choose_variant,
    facts_of,
)
from tests.drafter_service.plugins.vllm.fake_vllm import vllm_config

FACTS = HostFacts(
    SCHEDULER,
    "",
    "custom_class",
    PROPOSER,
    is_asynchronous=False,
    uses_v2_runner=False,
    pipeline_stages=1,
    has_scheduler_per_rank=False,
)
V2_FACTS = replace(FACTS, worker=WORKER, method="ngram", proposer="ngram", uses_v2_runner=True)
ASYNC_FACTS = replace(V2_FACTS, scheduler=ASYNC_SCHEDULER, is_asynchronous=True)


def test_facts_of_a_configuration():
    assert facts_of(vllm_config()) == FACTS
    config = vllm_config(scheduler_cls=None, async_scheduling=True)
    config.speculative_config = None
    assert facts_of(config) == replace(FACTS, scheduler="", method="", proposer="", is_asynchronous=True)
    config.scheduler_config.scheduler_cls = SimpleNamespace
    assert facts_of(config).scheduler == "types.SimpleNamespace"


def test_the_documented_flags_get_drafts():
    assert choose_variant("0.32", FACTS).variant is Variant.V1_SCHEDULER
    assert choose_variant("0.33", FACTS).variant is Variant.V1_SCHEDULER
    assert choose_variant("0.33", V2_FACTS).variant is Variant.V2_SCHEDULER
    assert choose_variant("0.33", ASYNC_FACTS).variant is Variant.V2_WORKER


@pytest.mark.parametrize(
    ("change", "reason", "is_error"),
    [
        ({"scheduler": ""}, "the scheduler is vLLM's own; start vLLM with --scheduler-cls", False),
        ({"method": ""}, "there is no speculative decoding; start vLLM with", False),
        ({"method": "", "is_asynchronous": True}, "there is no speculative decoding", True),
        ({"method": "ngram", "proposer": "ngram"}, "speculative decoding is ngram with ngram", False),
        ({"is_asynchronous": True}, "add --no-async-scheduling", True),
        ({"pipeline_stages": 2}, "pipeline parallelism", False),
    ],
)
def test_other_configurations_do_not_and_say_why(change, reason, is_error):
    choice = choose_variant("0.32", replace(FACTS, **change))
    assert choice.variant is Variant.NONE
    assert reason in choice.reason
    assert choice.is_error == is_error


@pytest.mark.parametrize(
    ("version", "change", "reason"),
    [
        (
            "0.32",
            {},
            "V2 model runner of vLLM 0.32 was not tested; set VLLM_USE_V2_MODEL_RUNNER=0, and start vLLM with",
        ),
        ("0.33", {"worker": "vllm.Worker"}, "the worker is vllm.Worker, whose V2 model runner takes no drafts"),
        ("0.33", {"method": "mtp", "proposer": "m"}, "mtp with m; start vLLM with --no-async-scheduling"),
        ("0.33", {"pipeline_stages": 2}, "pipeline parallelism"),
        ("0.33", {"uses_v2_runner": False}, '"method": "custom_class"'),
    ],
)
def test_other_configurations_of_the_v2_runner(version, change, reason):
    choice = choose_variant(version, replace(V2_FACTS, **change))
    assert (choice.variant, choice.is_error) == (Variant.NONE, False)
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("facts", "change", "reason"),
    [
        (V2_FACTS, {"is_asynchronous": True}, "the engine is asynchronous, and its scheduler is not; start vLLM with"),
        (ASYNC_FACTS, {"is_asynchronous": False}, "the engine is synchronous, and its scheduler is not"),
        (FACTS, {"scheduler": ASYNC_SCHEDULER}, "the engine is synchronous, and its scheduler is not"),
    ],
)
def test_a_scheduler_of_the_other_kind_is_refused(facts, change, reason):
    choice = choose_variant("0.33", replace(facts, **change))
    assert (choice.variant, choice.is_error) == (Variant.NONE, True)
    assert choice.reason.startswith(reason)


def test_schedulers_that_would_get_different_drafts_are_refused():
    """TRL's colocated engines with several tensor-parallel ranks. In the asynchronous variant one worker drafts."""
    config = vllm_config()
    config.parallel_config.distributed_executor_backend = "external_launcher"
    assert facts_of(config) == FACTS
    config.parallel_config.tensor_parallel_size = 2
    facts = facts_of(config)
    assert facts == replace(FACTS, has_scheduler_per_rank=True)
    for version, refused in (("0.32", facts), ("0.33", replace(V2_FACTS, has_scheduler_per_rank=True))):
        choice = choose_variant(version, refused)
        assert (choice.variant, choice.is_error) == (Variant.NONE, True)
        assert "set tensor_parallel_size to 1" in choice.reason
    assert choose_variant("0.33", replace(ASYNC_FACTS, has_scheduler_per_rank=True)).variant is Variant.V2_WORKER
    config.parallel_config.distributed_executor_backend = "mp"
    assert facts_of(config) == FACTS


@pytest.mark.parametrize(
    ("version", "is_supported"),
    [("0.32.0", True), ("0.32.1+cpu", True), ("0.33.0", True), ("0.34.0", False), ("0.3.2", False)],
)
def test_versions_that_were_not_tested_are_named(version, is_supported):
    choice = check_version(version)
    assert (choice is None) == is_supported
    if choice is not None:
        assert choice.reason == f"vLLM {version} was not tested, only 0.32, 0.33"


def test_the_report_says_what_happens(capsys):
    assert report(Choice(Variant.V1_SCHEDULER, "because")) == 0
    assert report(Choice(Variant.NONE, "because")) == 1
    assert report(Choice(Variant.NONE, "because", is_error=True)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "drafts: in the scheduler of the V1 model runner"
    assert lines[2] == "drafts: none; it would serve without them"
    assert lines[4] == "drafts: none; the server would not start"
    assert set(lines[1::2]) == {"why: because"}


def test_the_command_explains_itself(capsys):
    assert main(["--help"]) == 0
    assert main([]) == 2
    assert capsys.readouterr().out.count("usage:") == 2
