"""Parts of responses that do not need a server."""

import numpy as np

from engine.api.responses import usage
from engine.drafters.sources import DraftCounts
from engine.scheduling.request import Completion, FinishReason


def completion(tokens, cached, **by_source):
    return Completion(
        np.zeros(tokens, np.uint32), FinishReason.LENGTH, 2, 3, 1, cached_tokens=cached,
        by_source={name: DraftCounts(*counts) for name, counts in by_source.items()}, predicted=DraftCounts(2, 1),
    )  # fmt: skip


def test_usage_counts_each_prompt_once_and_no_pages_cached_by_its_own_outputs():
    # In the order in which they ended.
    one, two = {"corpus": (3, 1)}, {"mtp": (2, 1), "corpus": (1, 0)}
    ended = {3: completion(4, 48, **one), 0: completion(1, 16, **two), 1: completion(2, 80), 2: completion(3, 32)}
    result = usage([100, 60], ended)
    assert (result["prompt_tokens"], result["completion_tokens"], result["total_tokens"]) == (160, 10, 170)
    assert result["prompt_tokens_details"] == {"cached_tokens": 16 + 32}
    assert result["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 4}
    by_source = result["draft"].pop("by_source")
    assert result["draft"] == {"steps": 8, "drafted_tokens": 12, "accepted_tokens": 4, "tokens_per_step": 1.25}
    assert by_source == {
        "corpus": {"drafted_tokens": 4, "accepted_tokens": 1},
        "mtp": {"drafted_tokens": 2, "accepted_tokens": 1},
    }
