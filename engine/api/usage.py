"""What a request took, in OpenAI's words for predicted outputs, and what its drafts were worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.request import Completion


def usage_of(prompts: Sequence[int], completions: Sequence[Completion]) -> dict[str, Any]:
    """prompts: tokens of each prompt, counted once however many outputs it has."""
    prompt_tokens = sum(prompts)
    completion_tokens = sum(len(completion.tokens) for completion in completions)
    steps = sum(completion.steps for completion in completions)
    accepted = sum(completion.accepted for completion in completions)
    drafted = sum(completion.drafted for completion in completions)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": max((each.cached_tokens for each in completions), default=0)},
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
