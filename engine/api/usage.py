"""What a request took, in OpenAI's words for predicted outputs, and what its drafts were worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.scheduling.request import Completion


def usage_of(prompts: Sequence[int], completions: Mapping[int, Completion]) -> dict[str, Any]:
    """prompts: tokens of each prompt, counted once however many outputs it has. completions: by index, those of a
    prompt in a row, and as many for each.
    """
    each = completions.values()
    prompt_tokens = sum(prompts)
    completion_tokens = sum(len(completion.tokens) for completion in each)
    steps = sum(completion.steps for completion in each)
    accepted = sum(completion.accepted for completion in each)
    drafted = sum(completion.drafted for completion in each)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": _cached(len(completions) // len(prompts), completions)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "draft": {
            "steps": steps,
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "tokens_per_step": round(completion_tokens / steps, 3) if steps else None,
        },
    }


def _cached(outputs: int, completions: Mapping[int, Completion]) -> int:
    """Tokens of all prompts that were cached before; what an output found of its own siblings was not."""
    firsts = range(0, len(completions), outputs)
    return sum(min(completions[first + index].cached_tokens for index in range(outputs)) for first in firsts)
