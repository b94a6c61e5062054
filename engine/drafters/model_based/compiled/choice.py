"""Choose a draft token from logits within a compiled network, as `DraftSampler` does for paths without q."""

from __future__ import annotations

import numpy as np

from engine.drafters.model_based.compiled.layers import softmax_weights
from ssd.kernels.jit import vectorized
from ssd.kernels.noise import Sampling, bits_of, gumbel, key_at

CONSIDERED = 256
"""Number of most likely tokens that are sampled from, like `engine.sampling.draft_sampler.CONSIDERED`."""
HALVINGS = 40
"""Largest number of steps of the search for the bound of these tokens; more would not change a float32."""
NONE = -1
"""Returned instead of a token where logits are not numbers."""


@vectorized
def choose(logits, vocabulary, temperature, seed, position):
    """Return the token that a request drafts, `NONE` if logits are not numbers, and its score (`SampledTokens.scores`).

    logits: float32 [draft vocabulary], overwritten. vocabulary: see `layers.Network`. temperature: 0 for greedy.
    position: index of the token in its sequence.
    """
    best = 0
    for index in range(1, len(logits)):
        if logits[index] > logits[best]:
            best = index
    if not logits[best] > -np.inf:
        return np.int64(NONE), np.float32(0.0)
    if temperature == 0:
        scratch = np.empty(len(logits), np.int32)
        return _token(vocabulary, best), np.float32(1.0) / softmax_weights(logits, scratch)
    kept = np.empty(min(CONSIDERED, len(logits)), np.int64)
    noisy = np.empty(len(kept), np.float32)
    _keep_likeliest(logits, logits[best], kept)
    key = key_at(Sampling(True, seed, np.int64(0)), position)
    best = 0
    for index in range(len(kept)):
        noise = np.float32(gumbel(bits_of(key, _token(vocabulary, kept[index]))))
        noisy[index] = logits[kept[index]] / temperature + noise
        if noisy[index] > noisy[best]:
            best = index
    token = _token(vocabulary, kept[best])
    return token, np.float32(1.0) / softmax_weights(noisy, np.empty(len(kept), np.int32))


@vectorized
def _token(vocabulary, index):
    """Return the target's token of a logit."""
    return vocabulary[index] if len(vocabulary) else np.int64(index)


@vectorized
def _keep_likeliest(logits, largest, kept):
    """Write the indices of the `len(kept)` largest logits in ascending order; `largest`: the largest logit.

    Among equal logits at the bound, those of lower tokens are kept.
    """
    low = high = largest
    for index in range(len(logits)):
        low = min(low, logits[index])
    # At least `len(kept)` logits reach `low`, and fewer reach `high`, unless that many equal the largest.
    for _ in range(HALVINGS):
        if _count_from(logits, low) == len(kept):
            break
        middle = low + (high - low) * np.float32(0.5)
        if _count_from(logits, middle) >= len(kept):
            low = middle
        else:
            high = middle
    ties = max(0, len(kept) - _count_from(logits, high))
    size = 0
    for index in range(len(logits)):
        if size == len(kept) or logits[index] < low:
            continue
        if logits[index] < high:
            if ties == 0:
                continue
            ties -= 1
        kept[size] = index
        size += 1


@vectorized
def _count_from(logits, bound):
    """Return the number of logits of at least a bound."""
    count = np.int32(0)
    for index in range(len(logits)):
        count += np.int32(logits[index] >= bound)
    return count
