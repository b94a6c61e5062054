"""The drafts that vLLM should verify, and the flags with which it does."""

from __future__ import annotations

import json
from collections.abc import Sequence

from drafter_service.commands.advise.trials import Outcome

NEAR_BEST = 0.99
"""Share of the largest speed-up that a shorter maximum length of drafts must reach to be preferred."""
NEAR_PADDED = 0.95
"""Share of the synchronous speed-up from which asynchronous scheduling is preferred: it hides the host's own time."""
PLUGIN = "drafter_service.plugins.vllm"


def vllm_choice(paths: Sequence[Outcome], concurrency: int) -> Outcome:
    """Return what vLLM should verify with a number of requests at once.

    paths: predictions for paths with several maximum lengths, which synchronous scheduling verifies, and for paths that
    are padded to one length, as asynchronous scheduling does.
    """
    at_once = [one for one in paths if one.trial.concurrency == concurrency]
    ragged = [one for one in at_once if not one.trial.is_padded]
    fastest = max(one.speedup for one in ragged)
    padded = max((one for one in at_once if one.trial.is_padded), key=lambda one: one.speedup)
    if padded.speedup > max(1, NEAR_PADDED * fastest):
        return padded
    return min((one for one in ragged if one.speedup >= NEAR_BEST * fastest), key=lambda one: one.trial.max_draft)


def best_padded(paths: Sequence[Outcome]) -> list[Outcome]:
    """Return the fastest of the padded drafts for each number of requests at once, ascending."""
    padded = [one for one in paths if one.trial.is_padded]
    counts = sorted({one.trial.concurrency for one in padded})
    return [
        max((one for one in padded if one.trial.concurrency == count), key=lambda one: one.speedup) for count in counts
    ]


def longest_draft(choice: Outcome, padded: Sequence[Outcome]) -> int:
    """Return the largest length of a draft; padded: see `best_padded`."""
    return max(_lengths(padded).values()) if choice.trial.is_padded else choice.trial.max_draft


def vllm_flags(choice: Outcome, padded: Sequence[Outcome]) -> str:
    """Return flags of `vllm serve` for a choice; docs/hosts/vllm.md describes its two variants.

    padded: see `best_padded`.
    """
    settings: dict[str, object] = {"method": "ngram", "num_speculative_tokens": longest_draft(choice, padded)}
    scheduling, scheduler = "--no-async-scheduling", "Scheduler"
    if choice.trial.is_padded:
        scheduling, scheduler = "--async-scheduling", "AsyncScheduler"
        settings["num_speculative_tokens_per_batch_size"] = ranges_of(_lengths(padded))
    return (
        f"{scheduling} --scheduler-cls {PLUGIN}.{scheduler} --worker-cls {PLUGIN}.Worker "
        f"--speculative-config '{json.dumps(settings)}'"
    )


def _lengths(padded: Sequence[Outcome]) -> dict[int, int]:
    """Return the best length that drafts are padded to by number of requests at once; 0 where drafts do not pay."""
    return {one.trial.concurrency: one.trial.max_draft if one.speedup > 1 else 0 for one in padded}


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
