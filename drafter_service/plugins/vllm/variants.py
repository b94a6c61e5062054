"""Decides whether and how a version and configuration of vLLM gets drafts. Nothing else decides that."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

TESTED = ("0.32",)
"""Versions of vLLM, without the last number."""

PROPOSER = "drafter_service.plugins.vllm.NullProposer"
SCHEDULER = "drafter_service.plugins.vllm.Scheduler"
METHOD = "custom_class"

FLAGS = (
    f"--scheduler-cls {SCHEDULER} --speculative-config "
    f'\'{{"method": "{METHOD}", "model": "{PROPOSER}", "num_speculative_tokens": 8}}\''
)


class Variant(Enum):
    """Where drafts enter vLLM."""

    NONE = "none"
    """Nowhere: the host serves without drafts."""
    SCHEDULER = "scheduler"
    """In the synchronous scheduler of the V1 model runner."""


@dataclass(frozen=True)
class HostFacts:
    """Facts on which the choice depends, besides the version."""

    scheduler: str
    """Name of the scheduler's class; "" for vLLM's own."""
    method: str
    """Method of the speculative configuration; "" without one."""
    proposer: str
    """Model of the speculative configuration; "" without one."""
    is_asynchronous: bool
    """Whether a step is scheduled before the outcome of the previous one is known."""
    uses_v2_runner: bool
    pipeline_stages: int


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
    return check_version(__version__) or choose_variant(facts_of(vllm_config))


def check_version(version: str) -> Choice | None:
    """Return the choice for a version that was not tested; None for others."""
    if version.partition("+")[0].rpartition(".")[0] in TESTED:
        return None
    return Choice(Variant.NONE, f"vLLM {version} was not tested, only {', '.join(TESTED)}")


def choose_variant(facts: HostFacts) -> Choice:
    """Return the variant of a configuration."""
    if facts.scheduler != SCHEDULER:
        scheduler = facts.scheduler or "vLLM's own"
        return Choice(Variant.NONE, f"the scheduler is {scheduler}; start vLLM with {FLAGS}")
    if facts.method != METHOD or facts.proposer != PROPOSER:
        given = f"speculative decoding is {facts.method} with {facts.proposer}"
        reason = f"{given if facts.method else 'there is no speculative decoding'}; start vLLM with {FLAGS}"
        # Without speculative decoding vLLM schedules asynchronously by default.
        return Choice(Variant.NONE, reason, is_error=facts.is_asynchronous)
    if facts.is_asynchronous:
        reason = "asynchronous scheduling needs drafts for a step whose outcome is unknown; add --no-async-scheduling"
        return Choice(Variant.NONE, reason, is_error=True)
    if facts.uses_v2_runner:
        return Choice(Variant.NONE, "the V2 model runner does not take drafts from the scheduler")
    if facts.pipeline_stages > 1:
        return Choice(Variant.NONE, "pipeline parallelism was not tested")
    reason = "the V1 model runner verifies the drafts of its scheduler, which is synchronous with this proposer"
    return Choice(Variant.SCHEDULER, reason)


def facts_of(vllm_config: Any) -> HostFacts:
    """Return the facts of a `VllmConfig`."""
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    return HostFacts(
        scheduler=class_name(scheduler.scheduler_cls),
        method=getattr(speculative, "method", None) or "",
        proposer=str(getattr(speculative, "model", None) or ""),
        is_asynchronous=bool(scheduler.async_scheduling),
        uses_v2_runner=bool(vllm_config.use_v2_model_runner),
        pipeline_stages=vllm_config.parallel_config.pipeline_parallel_size,
    )


def class_name(given: str | type | None) -> str:
    """Return the full name of a class that may be given by its name; "" for None."""
    if given is None or isinstance(given, str):
        return given or ""
    return f"{given.__module__}.{given.__qualname__}"
