"""Drafts for vLLM, with a few of its own flags and no change of vLLM.

`variants.py` has the flags of each version. `python -m drafter_service.plugins.vllm check` with the flags of a server
says whether it would get drafts. vLLM is imported when it loads one of the classes, and only then.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AsyncScheduler", "NullProposer", "Scheduler", "Worker"]


class NullProposer:
    """The proposer of the V1 model runner: it proposes nothing, because the scheduler has the drafts.

    There is one scheduler for all tensor-parallel workers, so that these cannot get different drafts.
    """

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Return an empty draft for each request of the batch."""
        return [[] for _ in sampled_token_ids]


def __getattr__(name: str) -> Any:
    """Make one of the classes when vLLM loads it."""
    if name == "Scheduler":
        from drafter_service.plugins.vllm.scheduler import scheduler_class

        return scheduler_class()
    if name == "AsyncScheduler":
        from drafter_service.plugins.vllm import async_scheduler

        return async_scheduler.scheduler_class()
    if name == "Worker":
        from drafter_service.plugins.vllm.worker import worker_class

        return worker_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
