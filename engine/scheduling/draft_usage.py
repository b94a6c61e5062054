"""Report the drafts of completions, as in the field `usage` of the API and in the records of `generate`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from engine.drafters.sources import sum_by_name
from engine.scheduling.request import Completion
from ssd.types import ROOT

PREDICTED_AFTER = 4
"""Number of tokens before a draft that must also precede it in the prediction, so that common phrases do not count as
its continuation. At the beginning of an output there are fewer, which are enough."""


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


def is_predicted(prediction: np.ndarray, output: np.ndarray, draft: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """Return whether each draft token continues a prediction, bool [k].

    prediction: uint32 [H], text that the output may repeat. output: uint32 [n], the output before the draft. draft:
    uint32 [k]. parents: int32 [k], see `ssd.types.DraftBatch`.
    """
    context = output[-PREDICTED_AFTER:]
    starts = np.arange(len(context), len(prediction))
    if len(context) < PREDICTED_AFTER:
        starts = starts[:1]  # Only the beginning of the prediction can be the beginning of the output.
    for back in range(1, len(context) + 1):
        starts = starts[prediction[starts - back] == context[-back]]
    ends: list[np.ndarray] = []
    for token, parent in zip(draft.tolist(), parents.tolist(), strict=True):
        before = starts if parent == ROOT else ends[parent]
        before = before[before < len(prediction)]
        ends.append(before[prediction[before] == token] + 1)
    return np.array([len(each) > 0 for each in ends], bool)
