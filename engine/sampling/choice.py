"""Choose draft tokens from logits on the CPU, with the target's noise.

It gives the same tokens as PyTorch (`engine.sampling.draft_sampler`) in less time. Compiled networks call it within
their own kernels.
"""

from __future__ import annotations

import numpy as np

from ssd.kernels.jit import FloatRows, FloatsOut, LongRows, Longs, Nothing, kernel, vectorized
from ssd.kernels.noise import Sampling, bits_of, gumbel, key_at

NONE = -1
"""Stands for a token where a request can sample fewer than were requested."""
CONSIDERED = 256
"""Number of most likely tokens that candidates are sampled from; q has no others. Noise for the whole vocabulary would
take longer than the forward pass of a small drafter. At temperature 0.8 the shipped model samples another token in
0.6 % of all cases (2.9 % with 64)."""
HALVINGS = 40
"""Largest number of steps of the search for the bound of these tokens; more would not change a float32."""
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
"""Constants of `exponentials`; the logarithm of 2 in two parts (Cody and Waite, 1980)."""
LOWEST_EXPONENT = np.float32(-87.0)


@vectorized
def choose(logits, vocabulary, temperature, seed, position, tokens, scores):
    """Write the tokens that a request drafts, in the order in which they are to be tried, and their scores.

    logits: float32 [draft vocabulary], overwritten; -inf excludes a token. vocabulary: int64, the target's token of
    each logit; empty if they are equal. temperature: 0 for greedy. position: index of the token in its sequence.
    tokens: int64 [c], filled with `NONE`, which remains where fewer tokens can be sampled. scores: float32 [c], see
    `SampledTokens`.
    """
    if temperature == 0:
        _insert_best(logits, tokens)
        if tokens[0] != NONE:
            _finish(logits, vocabulary, tokens, scores)
        return
    kept = np.empty(min(CONSIDERED, len(logits)), np.int64)
    kept = kept[: _keep_likeliest(logits, kept)]
    noisy = np.empty(len(kept), np.float32)
    key = key_at(Sampling(True, seed, np.int64(0)), position)
    for index in range(len(kept)):
        kept[index], logit = _token(vocabulary, kept[index]), logits[kept[index]]
        noisy[index] = logit / temperature + np.float32(gumbel(bits_of(key, kept[index])))
    _insert_best(noisy, tokens)
    if tokens[0] != NONE:
        _finish(noisy, kept, tokens, scores)


@vectorized
def _finish(values, vocabulary, tokens, scores):
    """Replace indices of values by tokens, and write the softmax of these values."""
    total = softmax_weights(values, np.empty(len(values), np.int32))
    for rank in range(len(tokens)):
        index = tokens[rank]
        if index != NONE:
            tokens[rank], scores[rank] = _token(vocabulary, index), values[index] / total


@vectorized
def _token(vocabulary, index):
    """Return the target's token of a logit."""
    return vocabulary[index] if len(vocabulary) else np.int64(index)


@vectorized
def _insert_best(values, best):
    """Write the indices of the largest values above -inf to `best`, which is filled with `NONE`."""
    last = len(best) - 1
    for index in range(len(values)):
        value = values[index]
        if not value > -np.inf or (best[last] >= 0 and not value > values[best[last]]):
            continue
        rank = last
        while rank > 0 and (best[rank - 1] < 0 or value > values[best[rank - 1]]):
            best[rank] = best[rank - 1]
            rank -= 1
        best[rank] = index


@vectorized
def _keep_likeliest(logits, kept):
    """Write the indices of the `len(kept)` largest logits above -inf in ascending order; return their number.

    Among equal logits at the bound, those of lower tokens are kept.
    """
    low, high, reached = np.float32(np.inf), np.float32(-np.inf), 0
    for index in range(len(logits)):
        if logits[index] > -np.inf:
            low, high = min(low, logits[index]), max(high, logits[index])
            reached += 1
    # At least `len(kept)` logits, or all, reach `low`; fewer reach `high`, unless that many equal the largest.
    for _ in range(HALVINGS):
        if reached <= len(kept):
            break
        middle = low + (high - low) * np.float32(0.5)
        if middle <= low or middle >= high:
            break
        count = _count_from(logits, middle)
        if count >= len(kept):
            low, reached = middle, count
        else:
            high = middle
    ties = max(0, len(kept) - _count_from(logits, high))
    size = 0
    for index in range(len(logits)):
        if size == len(kept) or not logits[index] >= low:
            continue
        if logits[index] < high:
            if ties == 0:
                continue
            ties -= 1
        kept[size] = index
        size += 1
    return size


@vectorized
def _count_from(logits, bound):
    """Return the number of logits of at least a bound."""
    count = np.int32(0)
    for index in range(len(logits)):
        count += np.int32(logits[index] >= bound)
    return count


@vectorized
def softmax_weights(values, scratch):
    """Replace values by exponentials of their differences from the largest; return the sum."""
    largest = values[0]
    for index in range(1, len(values)):
        largest = max(largest, values[index])
    for index in range(len(values)):
        values[index] -= largest
    exponentials(values, scratch)
    total = np.float32(0.0)
    for index in range(len(values)):
        total += values[index]
    return total


@vectorized
def exponentials(values, scratch):
    """Replace values by their exponentials, to a relative error of 1e-6, from `LOWEST_EXPONENT` to 87.

    Other values are first replaced by the nearer limit. scratch: int32, at least as long. The loops make no calls, so
    that they are compiled to vector operations: exp(x) = 2 ** n * exp(r) with |r| <= ln(2) / 2; the polynomial is
    Cephes' (Moshier, 1992).
    """
    powers = scratch.view(np.float32)
    for index in range(len(values)):
        x = min(max(values[index], LOWEST_EXPONENT), -LOWEST_EXPONENT)
        # Conversion rounds towards zero, and the sum is positive.
        exponent = np.int32(x * LOG2_E + np.float32(127.5))
        n = np.float32(exponent - np.int32(127))
        r = x - n * LN2_HIGH - n * LN2_LOW
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        values[index] = p * r * r + r + np.float32(1.0)
        scratch[index] = np.int32(exponent) << np.int32(23)
    for index in range(len(values)):
        values[index] *= powers[index]


@kernel(FloatRows, FloatsOut, Longs, Longs, LongRows, FloatRows, returns=Nothing)
def choose_rows(logits, temperatures, seeds, positions, tokens, scores):
    """Choose tokens for each of n rows. temperatures: float32 [n]. The other arrays have a row or element for each."""
    for row in range(len(logits)):
        choose(
            logits[row], np.empty(0, np.int64), temperatures[row], seeds[row], positions[row], tokens[row], scores[row]
        )
