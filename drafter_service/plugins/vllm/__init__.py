"""Drafts for vLLM, with a few of its own flags and no change of vLLM.

`variants.py` has the flags of each version. `python -m drafter_service.plugins.vllm check` with the flags of a server
says whether it would get drafts. vLLM is imported when it loads one of the classes, and only then.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["AsyncScheduler", "NullProposer", "Scheduler", "Worker"]

MADE = {
    "AsyncScheduler": ("scheduler", "async_scheduler_class"),
    "Scheduler": ("scheduler", "scheduler_class"),
    "Worker": ("worker", "worker_class"),
}
"""Module and function that make each class."""


class NullProposer:
    """The proposer of the V1 model runner: it proposes nothing, because the scheduler has the drafts.

    There is one scheduler for all tensor-parallel workers, so that these cannot get different drafts.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Look for the sidecar. Raises UserError for settings that are not valid."""
        import_module(f"{__name__}.engine").look_before_loading(vllm_config)

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Return an empty draft for each request of the batch."""
        return [[] for _ in sampled_token_ids]


def __getattr__(name: str) -> Any:
    """Make one of the classes when vLLM loads it."""
    module, function = MADE.get(name, ("", ""))
    if not module:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), function)()
