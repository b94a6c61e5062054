"""Probabilities of candidates, given the random numbers with which the target samples.

A target that samples by the Gumbel-max trick produces the token of the largest log-probability plus noise. If the noise
depends only on a seed, the position and the token (`engine.sampling.noise`), the drafter knows it, too, and candidates
with large noise are more likely to be right (Gumbel coupling; Daliri et al., "Coupling without communication and
drafter-invariant speculative decoding", 2024). How much more depends on how exact the estimated probabilities are,
which is learned: given the noise, a candidate of probability p is right with a probability proportional to

    exp(w_log log p + w_noise noise),

and none of the candidates with one proportional to exp(w_left log(1 - sum of p) + w_none).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ssd.kernels.jit import Float, Int, inline, kernel, outline
from ssd.kernels.probabilities import FINAL, LOG_PROB, NOISE, OF_LEFT, OF_LOG, OF_NOISE, OF_NONE

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The increment of SplitMix64 (Steele, Lea and Flood, 2014)."""
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
MEAN_NOISE = 0.5772
"""Mean of the standard Gumbel distribution: noise of the best of many tokens, relative to the sum of probabilities."""
LEAST_PROB, LEAST_LEFT = 1e-6, 0.02
RATE = 0.003
"""Learning rate of the weights."""


class Sampling(NamedTuple):
    """Known facts about how the target samples a sequence."""

    is_known: bool
    """Whether the noise is known; the other fields are 0 if it is not."""
    seed: np.int64
    hinted: np.int64
    """Number of tokens of the sequence's text that precede its prompt."""


@inline
def _mix64(number):  # type: ignore[no-untyped-def]
    """Return SplitMix64's finalizer."""
    number = (number ^ (number >> np.uint64(30))) * MIX_1
    number = (number ^ (number >> np.uint64(27))) * MIX_2
    return number ^ (number >> np.uint64(31))


@inline
def key_at(sampling, end):  # type: ignore[no-untyped-def]
    """Return the key of the noise of the token that follows the first `end` tokens of a sequence's text."""
    return _mix64(_mix64(np.uint64(sampling.seed)) + np.uint64(end - sampling.hinted) * GOLDEN)


@inline
def bits_of(key, token):  # type: ignore[no-untyped-def]
    """Return the random number of a token, 32 bits."""
    return _mix64(key + (np.uint64(token) + np.uint64(1)) * GOLDEN) >> np.uint64(32)


@inline
def gumbel(bits):  # type: ignore[no-untyped-def]
    """Return the noise, standard Gumbel, of a random number of 32 bits."""
    return -math.log(-math.log1p(-(np.float64(bits) + 0.5) * 2.0**-32))


@inline
def _noise(key, token):  # type: ignore[no-untyped-def]
    """Return the noise of a token."""
    return gumbel(bits_of(key, token))


@kernel(Int, Int, Int, returns=Float)
def noise_of(seed, position, token):  # type: ignore[no-untyped-def]
    """Return the noise of a token at a position of its sequence."""
    return _noise(key_at(Sampling(True, seed, np.int64(0)), position), token)


@outline
def estimate_given_noise(candidates, estimates, count, total, key, weights):  # type: ignore[no-untyped-def]
    """Replace the probabilities of a node's candidates, whose sum is `total`; return the new sum.

    weights: float32 [4], learned.
    """
    scale = 1.0 / max(1.0, np.float64(total))
    none = weights[OF_LEFT] * math.log(max(1.0 - np.float64(total), LEAST_LEFT)) + weights[OF_NONE]
    best = none
    for index in range(count):
        estimates[index, LOG_PROB] = math.log(max(np.float64(estimates[index, FINAL]) * scale, LEAST_PROB))
        estimates[index, NOISE] = _noise(key, np.uint32(candidates[index, 0]))
        score = weights[OF_LOG] * estimates[index, LOG_PROB] + weights[OF_NOISE] * estimates[index, NOISE]
        estimates[index, FINAL] = score
        best = max(best, score)
    divisor = math.exp(none - best)
    for index in range(count):
        divisor += math.exp(np.float64(estimates[index, FINAL]) - best)
    total = np.float32(0.0)
    for index in range(count):
        estimates[index, FINAL] = math.exp(np.float64(estimates[index, FINAL]) - best) / divisor
        total += estimates[index, FINAL]
    return total


@outline
def learn_given_noise(candidates, estimates, count, token, weights):  # type: ignore[no-untyped-def]
    """Move the weights along the gradient of the log-probability of the token that the target produced."""
    left, none, of_log, of_noise = 1.0, 1.0, 0.0, 0.0
    is_none = 1.0
    for index in range(count):
        is_right = 1.0 if np.uint32(candidates[index, 0]) == token else 0.0
        error = is_right - np.float64(estimates[index, FINAL])
        of_log += error * estimates[index, LOG_PROB]
        of_noise += error * estimates[index, NOISE]
        left -= math.exp(np.float64(estimates[index, LOG_PROB]))
        none -= np.float64(estimates[index, FINAL])
        is_none -= is_right
    weights[OF_LOG] += RATE * of_log
    weights[OF_NOISE] += RATE * of_noise
    weights[OF_LEFT] += RATE * (is_none - none) * math.log(max(left, LEAST_LEFT))
    weights[OF_NONE] += RATE * (is_none - none)


@outline
def fallbacks_given_noise(found, count, left, key, weights):  # type: ignore[no-untyped-def]
    """Replace the probabilities of a node's fallback candidates; left: that none of its other candidates is right."""
    rest = 1.0
    for place in range(count):
        rest -= np.float64(found.probs[place] / left)
    other = weights[OF_LOG] * math.log(max(rest, LEAST_LEFT)) + weights[OF_NOISE] * MEAN_NOISE
    best = other
    for place in range(count):
        log_prob = math.log(max(np.float64(found.probs[place] / left), LEAST_PROB))
        found.probs[place] = weights[OF_LOG] * log_prob + weights[OF_NOISE] * _noise(key, found.tokens[place])
        best = max(best, np.float64(found.probs[place]))
    divisor = math.exp(other - best)
    for place in range(count):
        divisor += math.exp(np.float64(found.probs[place]) - best)
    for place in range(count):
        found.probs[place] = left * math.exp(np.float64(found.probs[place]) - best) / divisor
