"""Decides whether and how a version and configuration of vLLM gets drafts. Nothing else decides that."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from drafter_service.plugins.settings import untested

OWN = "vLLM's own"
PACKAGE = "drafter_service.plugins.vllm"
SCHEDULER, ASYNC_SCHEDULER = f"{PACKAGE}.Scheduler", f"{PACKAGE}.AsyncScheduler"
WORKER, PROPOSER = f"{PACKAGE}.Worker", f"{PACKAGE}.NullProposer"


class Variant(Enum):
    """Where drafts enter vLLM."""

    NONE = "none"
    """Nowhere: the host serves without drafts."""
    V1_SCHEDULER = "scheduler of the V1 model runner"
    """In the synchronous scheduler, which gives their ids to the runner."""
    V2_SCHEDULER = "scheduler, and the V2 model runner"
    """In the synchronous scheduler, and in a runner that takes their ids from it."""
    V2_WORKER = "worker, after each step of the V2 model runner"
    """In the first worker of the last pipeline stage, while the asynchronous scheduler is a step ahead."""


@dataclass(frozen=True)
class Setup:
    """What a variant needs of vLLM's configuration."""

    scheduler: str
    worker: str
    """Name of the worker's class; "" for any."""
    method: str
    model: str
    """Method and model of the speculative configuration."""
    flags: str
    """Flags of vLLM that give that."""
    reason: str
    """Why drafts are verified then."""


NGRAM = '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 8}\''
SETUPS = {
    Variant.V1_SCHEDULER: Setup(
        SCHEDULER,
        "",
        "custom_class",
        PROPOSER,
        f"--scheduler-cls {SCHEDULER} --speculative-config "
        f'\'{{"method": "custom_class", "model": "{PROPOSER}", "num_speculative_tokens": 8}}\'',
        "the V1 model runner verifies the drafts of its scheduler, which is synchronous with this proposer",
    ),
    Variant.V2_SCHEDULER: Setup(
        SCHEDULER,
        WORKER,
        "ngram",
        "ngram",
        f"--no-async-scheduling --scheduler-cls {SCHEDULER} --worker-cls {WORKER} {NGRAM}",
        "the V2 model runner verifies the drafts of its scheduler, which this worker gives to it",
    ),
    Variant.V2_WORKER: Setup(
        ASYNC_SCHEDULER,
        WORKER,
        "ngram",
        "ngram",
        f"--async-scheduling --scheduler-cls {ASYNC_SCHEDULER} --worker-cls {WORKER} {NGRAM}",
        "the V2 model runner verifies the drafts of this worker, which knows the tokens of the step before",
    ),
}

NETWORKS = ("draft_model", "eagle", "eagle3", "medusa", "mtp")
"""Methods of speculation that run a network, whose drafts the plug-in combines with those of the corpus."""

WITHOUT_LENGTHS = (
    "; all requests of a step verify the same number of draft tokens. With "
    '"enable_adaptive_verification": true in --speculative-config each request has its own number; vLLM refuses that '
    "with LoRA, pipeline parallelism, FlashAttention 2, and without full CUDA graphs"
)
WITH_LENGTHS = "; each request verifies as many draft tokens as their probabilities justify"

PER_RANK = (
    "with external_launcher each tensor-parallel rank has a scheduler, and these would get different drafts; "
    "set tensor_parallel_size to 1, or start a server, such as `vllm serve`, whose ranks have one scheduler"
)
SUPPORTED = {
    "0.32": (Variant.V1_SCHEDULER,),
    "0.33": (Variant.V2_SCHEDULER, Variant.V2_WORKER, Variant.V1_SCHEDULER),
}
"""Variants by the version of vLLM without its last number; the first is the one to recommend."""


@dataclass(frozen=True)
class Choice:
    """A variant and why."""

    variant: Variant
    reason: str
    is_error: bool = False
    """Whether an engine with this configuration would produce wrong outputs or fail, so that it must not start."""


def choose(vllm_config: Any) -> Choice:
    """Return the variant of the installed version of vLLM with a `VllmConfig`."""
    from vllm import __version__

    # Another version may lack what `choose_variant` reads.
    return check_version(__version__) or choose_variant(__version__.partition("+")[0].rpartition(".")[0], vllm_config)


def check_version(version: str) -> Choice | None:
    """Return the choice for a version that was not tested; None for others."""
    reason = untested("vLLM", version, tuple(SUPPORTED))
    return Choice(Variant.NONE, reason) if reason else None


def choose_variant(version: str, config: Any) -> Choice:
    """Return the variant of a `VllmConfig`. version: one of `SUPPORTED`."""
    parallel, is_asynchronous = config.parallel_config, bool(config.scheduler_config.async_scheduling)
    wanted = Variant.V1_SCHEDULER
    if config.use_v2_model_runner:
        wanted = Variant.V2_WORKER if is_asynchronous else Variant.V2_SCHEDULER
    if reason := reason_against(version, wanted, config):
        # A scheduler of the other kind than the engine counts tokens of steps in flight wrongly.
        scheduler = class_name(config.scheduler_config.scheduler_cls)
        return Choice(Variant.NONE, reason, scheduler == (SCHEDULER if is_asynchronous else ASYNC_SCHEDULER))
    is_per_rank = parallel.distributed_executor_backend == "external_launcher" and parallel.tensor_parallel_size > 1
    if is_per_rank and wanted is not Variant.V2_WORKER:
        return Choice(Variant.NONE, PER_RANK, is_error=True)
    reason = SETUPS[wanted].reason
    if wanted is Variant.V2_WORKER:
        reason += WITH_LENGTHS if config.speculative_config.enable_adaptive_verification else WITHOUT_LENGTHS
    return Choice(wanted, reason)


def reason_against(version: str, wanted: Variant, config: Any) -> str:
    """Return why a `VllmConfig` does not get a variant's drafts; "" if it does."""
    setup, speculative = SETUPS[wanted], config.speculative_config
    advice = f"start vLLM with {SETUPS[wanted if wanted in SUPPORTED[version] else SUPPORTED[version][0]].flags}"
    scheduler = class_name(config.scheduler_config.scheduler_cls)
    # vLLM replaces its default worker by that of the platform.
    worker = class_name(config.parallel_config.worker_cls)
    is_asynchronous = bool(config.scheduler_config.async_scheduling)
    if scheduler not in (SCHEDULER, ASYNC_SCHEDULER):
        return f"the scheduler is {scheduler or OWN}; {advice}"
    if speculative is None:
        return f"there is no speculative decoding; {advice}"
    has_network = wanted is not Variant.V2_SCHEDULER and speculative.method in NETWORKS
    if has_network and speculative.draft_sample_method != "greedy":
        return (
            f"the draft_sample_method is {speculative.draft_sample_method}, so that vLLM compares sampled draft tokens "
            f"with the network's probabilities; set it to greedy"
        )
    if wanted is Variant.V2_SCHEDULER and speculative.method in NETWORKS:
        flags = f"--async-scheduling --scheduler-cls {ASYNC_SCHEDULER} --worker-cls {WORKER}"
        return f"the drafts of a network stay in the workers of the V2 model runner; start vLLM with {flags}"
    if not has_network and (speculative.method, speculative.model) != (setup.method, setup.model):
        return f"speculative decoding is {speculative.method} with {speculative.model}; {advice}"
    if wanted not in SUPPORTED[version]:
        return f"the V2 model runner of vLLM {version} was not tested; set VLLM_USE_V2_MODEL_RUNNER=0, and {advice}"
    if is_asynchronous and wanted is Variant.V1_SCHEDULER:
        return "the V1 model runner needs the tokens of a step before the next is scheduled; add --no-async-scheduling"
    if scheduler != setup.scheduler:
        other = Variant.V2_SCHEDULER if wanted is Variant.V2_WORKER else Variant.V2_WORKER
        kind = "asynchronous" if is_asynchronous else "synchronous"
        return f"the engine is {kind}, and its scheduler is not; {advice}, or with {SETUPS[other].flags}"
    if setup.worker and worker != setup.worker:
        return f"the worker is {worker}, whose V2 model runner takes no drafts from the plug-in; {advice}"
    if wanted is Variant.V2_SCHEDULER and speculative.enable_adaptive_verification:
        return (
            "enable_adaptive_verification is for asynchronous scheduling; remove it, since drafts that the scheduler "
            "has are as long as is worth verifying"
        )
    is_v1_pipeline = wanted is Variant.V1_SCHEDULER and config.parallel_config.pipeline_parallel_size > 1
    return "pipeline parallelism was not tested with the V1 model runner" if is_v1_pipeline else ""


def class_name(given: str | type | None) -> str:
    """Return the full name of a class that may be given by its name; "" for None."""
    return f"{given.__module__}.{given.__qualname__}" if isinstance(given, type) else given or ""
