"""Report the drafts of completions, as in the field `usage.draft` of the API and in the records of `generate`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from engine.drafters.sources import sum_by_name
from engine.scheduling.request import Completion


def draft_usage(completions: Collection[Completion]) -> dict[str, Any]:
    """Return numbers of verify steps and of draft tokens, in total and by source, as JSON values."""
    steps = sum(completion.steps for completion in completions)
    tokens = sum(len(completion.tokens) for completion in completions)
    by_source = sum_by_name(completion.by_source for completion in completions)
    return {
        "steps": steps,
        "drafted_tokens": sum(completion.drafted for completion in completions),
        "accepted_tokens": sum(completion.accepted for completion in completions),
        "tokens_per_step": round(tokens / steps, 3) if steps else None,
        "by_source": {
            name: {"drafted_tokens": counts.drafted, "accepted_tokens": counts.accepted}
            for name, counts in by_source.items()
        },
    }
