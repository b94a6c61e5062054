"""Learn a step-time curve from the steps that ran.

The curve is a sum of parts of a prior curve, each multiplied by a factor: the time of a step with one token, the time
that further sequences add, by how much a step takes longer if a sequence has several tokens, and the time that further
tokens add from each knot to the next. No factor is negative, so larger steps never take less time, and the first one
is positive, so every step takes some time. The factors are the most probable ones given the durations (ridge regression
with non-negative coefficients, each duration weighted by its expected value). Without durations a factor is 1, and
factors of nearby knots resemble each other, so a few steps teach the cost of sizes that have not run yet.

A single step changes what is expected by a limited fraction, because it may have been disturbed. Old steps lose weight
slowly; parts whose steps have lost their weight take their factors from nearby parts and the prior curve. The scale of
the whole curve follows recent steps, so that a change of speed is not taken for a change of the slopes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from ssd.kernels.jit import Bool, Doubles, Float, Nothing, fields_of, kernel, outline

COMMON = 0.5
"""Share of the variance of the factors of tokens that all of them have in common."""
DISTANCE = 1.0
"""Difference of the logarithms of numbers of tokens over which the other share is correlated by 1/e."""
NOISE = 0.1
"""Relative standard deviation of durations."""
MIN_LIMIT, LIMIT_RATIO = 0.4, 3.0
"""Limit of the relative deviation of a duration from the expected one: this value, or this multiple of the mean
deviation of recent steps if that is larger, because a wrong curve causes large deviations."""
DEVIATION_RATE = 0.1
"""Weight of a step in the mean deviation."""
KEPT = 1.0 - 1.0 / 1000.0
"""Share of the weight of a step that is left after another one: a window of about 1000 steps."""
FEW_STEPS = 20
"""Number of first steps in which a step that takes less than half of what is expected replaces all before it: steps are
only disturbed by taking longer, and the first ones compile and allocate."""
LEVEL_RATE = 0.1
"""Share of a deviation that changes the scale of the whole curve: other load, longer contexts and another clock rate
change the time of all sizes."""
PRIOR_RATE, MAX_PRIOR_RATIO = 0.05, 3.0
"""Weight of a step in the mean ratio of durations to those of the prior curve. If that is above the second number, or
below its inverse, the prior curve is multiplied by it, since factors are expected to be near 1."""
MIN_TRIALS = 6.0
"""Number of recent steps that must have reached a part of the curve before its factor is used. The first part with
fewer is expected to add no time, so that the next larger size is tried, and again when these steps have lost their
weight."""
RAGGED_TIME, RAGGED_SPREAD = 0.05, 4.0
"""How much longer a step takes in the prior curve if a sequence has several tokens, as a fraction of the time with one
token each, and the standard deviation of its factor. Engines have faster ways for one token each."""
SMALLEST_EMPTY = 0.01
"""Smallest factor of a step with one token. If prompts take nearly all the time, durations tell little about it."""
SMALLEST_SLOPE = 0.1 / 64
"""Smallest time that a token adds in the prior curve, as a fraction of an empty step, since factors cannot change 0."""
SWEEPS, TOLERANCE = 30, 1e-4
"""Maximum number of passes over the factors, and the largest change at which they end."""

# Indices of the first factors.
EMPTY, PER_SEQUENCE, RAGGED, PER_TOKEN = range(4)
# Entries of `Fit.state`: factor of the whole curve, number of recorded steps, and means of recent steps: the relative
# deviation of their durations from the expected ones, and the logarithm of the ratio to those of the prior curve.
SCALE, STEPS, DEVIATION, PRIOR_RATIO = range(4)

_Matrix = types.Array(types.float64, 2, "C")


class Fit(NamedTuple):
    """The factors of a prior curve, and the sums that they are computed from; F is the number of factors."""

    knots: np.ndarray
    """float64 [K]: ascending numbers of tokens."""
    factors: np.ndarray
    """float64 [F]: of a step with one token, of further sequences, of sequences with several tokens, and of further
    tokens between neighboring knots."""
    trials: np.ndarray
    """float64 [K - 1]: decayed number of steps that reached each part."""
    state: np.ndarray
    prior: np.ndarray
    """float64 [F, F]: inverse of the covariance of the factors without durations, whose means are 1."""
    precision: np.ndarray
    """float64 [F, F]: weighted sum of the products of features."""
    weighted: np.ndarray
    """float64 [F]: weighted sum of features times durations."""
    features: np.ndarray
    """float64 [F]: scratch; what a step has of each part."""

    @classmethod
    def of(cls, knots: np.ndarray, spread: float) -> Fit:
        """Return the fit before any step.

        knots: float64 [K], K > 1. spread: standard deviation of the factors of tokens and sequences around 1.
        """
        middle = np.log(knots[1:] * knots[:-1]) / 2
        nearness = np.exp(-np.abs(middle[:, None] - middle) / DISTANCE)
        count = PER_TOKEN + len(middle)
        covariance = np.diag([1.0, spread**2, RAGGED_SPREAD**2] + [0.0] * len(middle))
        covariance[PER_TOKEN:, PER_TOKEN:] = spread**2 * (COMMON + (1 - COMMON) * nearness)
        sums = np.linalg.inv(covariance), np.zeros((count, count)), np.zeros(count), np.zeros(count)
        return cls(knots, np.ones(count), np.zeros(len(middle)), np.array([1.0, 0.0, 0.0, 0.0]), *sums)

    @property
    def tried(self) -> float:
        """Largest number of tokens up to which enough steps have run."""
        untried = self.trials < MIN_TRIALS
        return float(self.knots[untried.argmax() if untried.any() else -1])

    def ragged_seconds(self, parts: np.ndarray) -> float:
        """Return how much longer a step takes if a sequence has several tokens; parts: see `parts_of`."""
        return float(parts[RAGGED] * self.factors[RAGGED] * self.state[SCALE])


def parts_of(prior: np.ndarray, empty: float, knots: np.ndarray, sequences: int) -> np.ndarray:
    """Return the parts of a prior curve in the order of the factors, float64 [F].

    prior: float64 [K], durations at the knots for this number of sequences. empty: that of the first knot for one
    sequence.
    """
    slope = SMALLEST_SLOPE * empty
    per_token = np.maximum(np.diff(prior), slope * np.diff(knots))
    per_sequence = max(prior[0] - empty, slope * (sequences - 1))
    return np.concatenate(([empty, per_sequence, RAGGED_TIME * prior[0]], per_token))


@outline
def _set_features(fit, parts, tokens, is_ragged):
    """Write what a step of a number of tokens has of each part, and count it as a trial of them."""
    fit.features[EMPTY], fit.features[PER_SEQUENCE] = parts[EMPTY], parts[PER_SEQUENCE]
    fit.features[RAGGED] = parts[RAGGED] * is_ragged
    last = len(fit.trials) - 1
    for part in range(last + 1):
        low, high = fit.knots[part], fit.knots[part + 1]
        share = max(0.0, (tokens - low) / (high - low))
        fit.features[PER_TOKEN + part] = parts[PER_TOKEN + part] * (share if part == last else min(share, 1.0))
        fit.trials[part] = KEPT * fit.trials[part] + (1.0 if tokens > low else 0.0)


@outline
def _rescale(fit, ratio):
    """Multiply the prior curve by the mean ratio of durations to it, if that is far from 1; ratio: of the last step."""
    state = fit.state
    state[PRIOR_RATIO] += PRIOR_RATE * (np.log(max(ratio, 1e-9)) - state[PRIOR_RATIO])
    if abs(state[PRIOR_RATIO]) > np.log(MAX_PRIOR_RATIO):
        mean = np.exp(state[PRIOR_RATIO])
        state[SCALE] *= mean
        fit.factors[:] /= mean
        fit.precision[:] *= mean * mean
        fit.weighted[:] *= mean
        state[PRIOR_RATIO] = 0.0


@outline
def _solve(fit):
    """Minimize the quadratic form over non-negative factors, one factor at a time, beginning with their values."""
    prior, precision, factors = fit.prior, fit.precision, fit.factors
    for _ in range(SWEEPS):
        change = 0.0
        for row in range(len(factors)):
            residual = fit.weighted[row]
            for column in range(len(factors)):
                residual += prior[row, column] - (prior[row, column] + precision[row, column]) * factors[column]
            least = SMALLEST_EMPTY if row == EMPTY else 0.0
            value = max(least, factors[row] + residual / (prior[row, row] + precision[row, row]))
            change = max(change, abs(value - factors[row]))
            factors[row] = value
        if change < TOLERANCE:
            return


FIT = fields_of(Fit, *[Doubles] * 4, *[_Matrix] * 2, *[Doubles] * 2)


@kernel(FIT, Doubles, Float, Float, Bool, returns=Float)
def record_step(fit, parts, tokens, seconds, is_ragged):
    """Learn from a step of a number of tokens; return how long it was expected to take, 0 for the first step.

    parts: those of the prior curve for the number of sequences of the step. is_ragged: whether one of these has several
    tokens.
    """
    factors, state, precision, weighted, features = fit.factors, fit.state, fit.precision, fit.weighted, fit.features
    _set_features(fit, parts, tokens, is_ragged)
    expected = 0.0
    for row in range(len(factors)):
        expected += features[row] * factors[row]
    known = expected * state[SCALE] if state[STEPS] > 0 else 0.0
    if state[STEPS] == 0 or (state[STEPS] < FEW_STEPS and seconds < known / 2):
        state[SCALE] = seconds / expected
        precision[:] = 0.0
        weighted[:] = 0.0
    deviation = seconds / (expected * state[SCALE]) - 1.0
    limit = max(MIN_LIMIT, LIMIT_RATIO * state[DEVIATION])
    state[DEVIATION] += DEVIATION_RATE * (min(abs(deviation), 2.0 * limit) - state[DEVIATION])
    limited = min(max(deviation, -limit), limit)
    level = 1.0 + LEVEL_RATE * limited
    state[SCALE] *= level
    weight = 1.0 / (NOISE * expected) ** 2
    for row in range(len(factors)):
        weighted[row] = KEPT * weighted[row] + weight * features[row] * expected * (1.0 + limited) / level
        for column in range(len(factors)):
            precision[row, column] = KEPT * precision[row, column] + weight * features[row] * features[column]
    state[STEPS] += 1
    _rescale(fit, (1.0 + limited) * expected / np.sum(features))
    _solve(fit)
    return known


@kernel(FIT, Doubles, Float, Doubles, returns=Nothing)
def write_seconds(fit, parts, next_size, seconds):
    """Write the durations at the knots, float64 [K].

    parts: those of the prior curve. next_size: smallest number of tokens above `Fit.tried` that a step can have, if
    that is limited.
    """
    factors, trials, state = fit.factors, fit.trials, fit.state
    total, is_tried = parts[EMPTY] * factors[EMPTY] + parts[PER_SEQUENCE] * factors[PER_SEQUENCE], True
    seconds[0] = total * state[SCALE]
    for part in range(len(trials)):
        # The first part that was not tried takes no time, nor do others up to the next size.
        is_free = trials[part] < MIN_TRIALS and (is_tried or fit.knots[part] < next_size)
        is_tried = is_tried and trials[part] >= MIN_TRIALS
        if not is_free:
            total += parts[PER_TOKEN + part] * factors[PER_TOKEN + part]
        seconds[part + 1] = total * state[SCALE]
