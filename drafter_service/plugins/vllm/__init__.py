"""Drafts for vLLM, with two of its own flags and no change of vLLM:

    vllm serve MODEL --scheduler-cls drafter_service.plugins.vllm.Scheduler --speculative-config '{
        "method": "custom_class", "model": "drafter_service.plugins.vllm.NullProposer", "num_speculative_tokens": 8}'

`python -m drafter_service.plugins.vllm check` with the same flags says whether the installed vLLM would get drafts.
vLLM is imported when its scheduler is needed, and only then.
"""

from __future__ import annotations

from typing import Any

__all__ = ["NullProposer", "Scheduler"]


class NullProposer:
    """The proposer of vLLM's workers: it proposes nothing, because the scheduler has the drafts.

    There is one scheduler for all tensor-parallel workers, so that these cannot get different drafts.
    """

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Return an empty draft for each request of the batch."""
        return [[] for _ in sampled_token_ids]


def __getattr__(name: str) -> Any:
    """Make the class `Scheduler` when vLLM asks for it."""
    if name != "Scheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from drafter_service.plugins.vllm.scheduler import scheduler_class

    return scheduler_class()
