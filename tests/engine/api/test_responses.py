"""Parts of responses that do not need a server."""

import numpy as np

from engine.api.responses import usage
from engine.scheduling.request import Completion, FinishReason


def completion(tokens, cached):
    return Completion(np.zeros(tokens, np.uint32), FinishReason.LENGTH, 2, 3, 1, cached_tokens=cached)


def test_usage_counts_each_prompt_once_and_no_pages_cached_by_its_own_outputs():
    # In the order in which they ended.
    ended = {3: completion(4, 48), 0: completion(1, 16), 1: completion(2, 80), 2: completion(3, 32)}
    result = usage([100, 60], ended)
    assert (result["prompt_tokens"], result["completion_tokens"], result["total_tokens"]) == (160, 10, 170)
    assert result["prompt_tokens_details"] == {"cached_tokens": 16 + 32}
    assert result["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 8}
    assert result["draft"] == {"steps": 8, "drafted_tokens": 12, "accepted_tokens": 4, "tokens_per_step": 1.25}
