"""Flags with which vLLM runs the recommended drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

NEAR_PADDED = 0.95
"""Share of the synchronous speed-up from which asynchronous scheduling is preferred: it hides the host's own time."""
PLUGIN = "drafter_service.plugins.vllm"


class PaddedSpeedup(NamedTuple):
    """Predicted speed-up where each draft is padded to one length."""

    max_draft: int
    concurrency: int
    speedup: float


def vllm_flags(speedup: float, max_draft: int, padded: Sequence[PaddedSpeedup], concurrency: int) -> str:
    """Return flags of `vllm serve`; docs/hosts/vllm.md describes its two variants.

    speedup: with drafts of any length up to `max_draft`, which synchronous scheduling verifies. padded: with the best
    single length, which asynchronous scheduling pads all drafts to, for ascending numbers of requests at once.
    concurrency: one of them, which is expected.
    """
    [expected] = [one for one in padded if one.concurrency == concurrency]
    settings: dict[str, object] = {"method": "ngram", "num_speculative_tokens": max_draft}
    scheduling, scheduler = "--no-async-scheduling", "Scheduler"
    if expected.speedup >= max(1, NEAR_PADDED * speedup):
        scheduling, scheduler = "--async-scheduling", "AsyncScheduler"
        lengths = {one.concurrency: one.max_draft if one.speedup > 1 else 0 for one in padded}
        settings["num_speculative_tokens"] = max(lengths.values())
        settings["num_speculative_tokens_per_batch_size"] = ranges_of(lengths)
    return (
        f"{scheduling} --scheduler-cls {PLUGIN}.{scheduler} --worker-cls {PLUGIN}.Worker "
        f"--speculative-config '{json.dumps(settings)}'"
    )


def ranges_of(lengths: dict[int, int]) -> list[list[int]]:
    """Return ranges of batch sizes, first and last, with a length of drafts, as vLLM reads them.

    lengths: by batch size, ascending; sizes in between have that of the next larger one.
    """
    ranges: list[list[int]] = []
    for count, length in lengths.items():
        if ranges and ranges[-1][2] == length:
            ranges[-1][1] = count
        else:
            ranges.append([ranges[-1][1] + 1 if ranges else 1, count, length])
    return ranges
