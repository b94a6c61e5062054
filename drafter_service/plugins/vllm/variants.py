"""Decides whether and how a version and configuration of vLLM gets drafts. Nothing else decides that."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

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
    """In the first worker, while the asynchronous scheduler is a step ahead."""


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
class HostFacts:
    """Facts on which the choice depends, besides the version."""

    scheduler: str
    """Name of the scheduler's class; "" for vLLM's own."""
    worker: str
    """Name of the worker's class. vLLM replaces its default by that of the platform."""
    method: str
    """Method of the speculative configuration; "" without one."""
    proposer: str
    """Model of the speculative configuration; "" without one."""
    is_asynchronous: bool
    """Whether a step is scheduled before the outcome of the previous one is known."""
    uses_v2_runner: bool
    pipeline_stages: int
    has_scheduler_per_rank: bool
    """Whether each tensor-parallel rank has a scheduler of its own."""


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

    # Another version may lack what `facts_of` reads.
    return check_version(__version__) or choose_variant(minor_version(__version__), facts_of(vllm_config))


def check_version(version: str) -> Choice | None:
    """Return the choice for a version that was not tested; None for others."""
    if minor_version(version) in SUPPORTED:
        return None
    return Choice(Variant.NONE, f"vLLM {version} was not tested, only {', '.join(SUPPORTED)}")


def minor_version(version: str) -> str:
    """Return a version without its last number, such as "0.33"."""
    return version.partition("+")[0].rpartition(".")[0]


def choose_variant(version: str, facts: HostFacts) -> Choice:
    """Return the variant of a configuration. version: one of `SUPPORTED`."""
    wanted = Variant.V1_SCHEDULER
    if facts.uses_v2_runner:
        wanted = Variant.V2_WORKER if facts.is_asynchronous else Variant.V2_SCHEDULER
    if reason := reason_against(version, wanted, facts):
        # A scheduler of the other kind than the engine counts tokens of steps in flight wrongly.
        is_error = facts.scheduler == (SCHEDULER if facts.is_asynchronous else ASYNC_SCHEDULER)
        return Choice(Variant.NONE, reason, is_error)
    if facts.has_scheduler_per_rank and wanted is not Variant.V2_WORKER:
        return Choice(Variant.NONE, PER_RANK, is_error=True)
    return Choice(wanted, SETUPS[wanted].reason)


def reason_against(version: str, wanted: Variant, facts: HostFacts) -> str:
    """Return why a configuration does not get a variant's drafts; "" if it does."""
    setup = SETUPS[wanted]
    advice = f"start vLLM with {SETUPS[wanted if wanted in SUPPORTED[version] else SUPPORTED[version][0]].flags}"
    if facts.scheduler not in (SCHEDULER, ASYNC_SCHEDULER):
        return f"the scheduler is {facts.scheduler or OWN}; {advice}"
    if not facts.method:
        return f"there is no speculative decoding; {advice}"
    if (facts.method, facts.proposer) != (setup.method, setup.model):
        return f"speculative decoding is {facts.method} with {facts.proposer}; {advice}"
    if wanted not in SUPPORTED[version]:
        return f"the V2 model runner of vLLM {version} was not tested; set VLLM_USE_V2_MODEL_RUNNER=0, and {advice}"
    if facts.is_asynchronous and wanted is Variant.V1_SCHEDULER:
        return "the V1 model runner needs the tokens of a step before the next is scheduled; add --no-async-scheduling"
    if facts.scheduler != setup.scheduler:
        other = Variant.V2_SCHEDULER if wanted is Variant.V2_WORKER else Variant.V2_WORKER
        kind = "asynchronous" if facts.is_asynchronous else "synchronous"
        return f"the engine is {kind}, and its scheduler is not; {advice}, or with {SETUPS[other].flags}"
    if setup.worker and facts.worker != setup.worker:
        return f"the worker is {facts.worker}, whose V2 model runner takes no drafts from the plug-in; {advice}"
    if facts.pipeline_stages > 1:
        return "pipeline parallelism was not tested"
    return ""


def facts_of(vllm_config: Any) -> HostFacts:
    """Return the facts of a `VllmConfig`."""
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    parallel = vllm_config.parallel_config
    return HostFacts(
        scheduler=class_name(scheduler.scheduler_cls),
        worker=class_name(parallel.worker_cls),
        method=getattr(speculative, "method", None) or "",
        proposer=str(getattr(speculative, "model", None) or ""),
        is_asynchronous=bool(scheduler.async_scheduling),
        uses_v2_runner=bool(vllm_config.use_v2_model_runner),
        pipeline_stages=parallel.pipeline_parallel_size,
        has_scheduler_per_rank=parallel.distributed_executor_backend == "external_launcher"
        and parallel.tensor_parallel_size > 1,
    )


def class_name(given: str | type | None) -> str:
    """Return the full name of a class that may be given by its name; "" for None."""
    if given is None or isinstance(given, str):
        return given or ""
    return f"{given.__module__}.{given.__qualname__}"
