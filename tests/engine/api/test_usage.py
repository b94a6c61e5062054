"""What a response says it took."""

import numpy as np

from engine.api.usage import usage_of
from engine.scheduling.request import Completion, FinishReason


def completion(tokens, cached):
    return Completion(np.zeros(tokens, np.uint32), FinishReason.LENGTH, 2, 3, 1, cached_tokens=cached)


def test_each_prompt_counts_once_and_what_its_own_outputs_shared_was_not_cached():
    # They come in the order in which they ended.
    ended = {3: completion(4, 48), 0: completion(1, 16), 1: completion(2, 80), 2: completion(3, 32)}
    usage = usage_of([100, 60], ended)
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (160, 10, 170)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16 + 32}
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 8}
    assert usage["draft"] == {"steps": 8, "drafted_tokens": 12, "accepted_tokens": 4, "tokens_per_step": 1.25}
