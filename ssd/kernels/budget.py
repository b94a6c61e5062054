"""Select the draft tokens of a batch that raise tokens per second in the long run.

Verifying the m likeliest draft tokens of a batch yields sum(path_prob) tokens more and takes t(N + m) - t(N) longer,
where t is the step-time curve and N the number of other tokens in the step. It is worthwhile if it yields more tokens
than the engine produces in that time at its mean rate (the renewal-reward theorem; Dinkelbach, "On nonlinear fractional
programming", 1967). The m that maximizes

    sum of the m largest path_prob - rate * (t(N + m) - t(N))

decides for all sequences together which tokens of their drafts are verified.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from numba import types

from ssd.budget.padding import MAX_LENGTHS, MAX_SIZES
from ssd.kernels.arrays import opener
from ssd.kernels.jit import Float, FloatPair, Floats, Int, Longs, Nothing, Tokens, inline, kernel, outline

MAX_KNOTS = 128
"""Largest number of knots of a step-time curve."""

# Entries of `Budget.facts`.
KNOTS, SIZES, LENGTHS, TOKENS, SEQUENCES = range(5)
"""Number of used elements of the arrays `knots`, `sizes` and `lengths`; number of tokens of the step without drafts,
and of its sequences."""
FACTS = 5

# Entries of `Budget.state`.
MEAN_TOKENS, MEAN_TIME, CUT, WITHHELD, RAGGED = range(5)
"""Running means of tokens per step of a sequence, and of the time of a step, relative to that of a step without drafts;
path probability at which recent batches were cut; number of draft tokens that were not worth verifying; by how much
a step takes longer if a sequence has several tokens."""
STATE = 5

START_STATE = (1.5, 1.0, 0.05, 0.0, 0.0)
RATE = 0.001
"""Weight of a sequence's step in the running means."""
FLOOR = 0.0015
"""Smallest path probability of a draft token, unless all tokens take equally long."""
MARGIN = np.float32(0.5)
"""Drafts grow to this share of the recent cut, since it differs from batch to batch."""
CUT_RATE = 0.3
CUT_DECAY = 0.8
"""Factor of the cut after a batch in which all draft tokens were worth verifying."""


class Budget(NamedTuple):
    """The arrays of a `ssd.budget.token_budget.TokenBudget`."""

    knots: Annotated[np.ndarray, np.float64, MAX_KNOTS]
    """Ascending numbers of tokens."""
    seconds: Annotated[np.ndarray, np.float64, MAX_KNOTS]
    """Duration of a step with that number of tokens, without `RAGGED`; linear in between, and beyond."""
    sizes: Annotated[np.ndarray, np.int64, MAX_SIZES]
    """Ascending numbers of tokens that the engine pads steps to; larger steps are not padded."""
    lengths: Annotated[np.ndarray, np.int64, MAX_LENGTHS]
    """Ascending lengths of drafts; the engine pads all drafts of a step to one of them. Empty: it does not."""
    facts: Annotated[np.ndarray, np.int64, FACTS]
    state: Annotated[np.ndarray, np.float64, STATE]


open_budget = opener(Budget)


@inline
def _seconds_between(budget, right, tokens):  # type: ignore[no-untyped-def]
    """Return the duration of a step of a number of tokens, on the line that ends at the knot `right`."""
    knots, seconds, left = budget.knots, budget.seconds, right - 1
    slope = (seconds[right] - seconds[left]) / (knots[right] - knots[left])
    return seconds[left] + (tokens - knots[left]) * slope


@outline
def step_seconds(budget, tokens):  # type: ignore[no-untyped-def]
    """Return the duration of a step of a number of tokens."""
    ragged = budget.state[RAGGED] if tokens > budget.facts[SEQUENCES] else 0.0
    count = budget.facts[SIZES]
    if count > 0:
        place = np.searchsorted(budget.sizes[:count], tokens)
        if place < count:
            tokens = budget.sizes[place]
    last = budget.facts[KNOTS] - 1
    right = np.searchsorted(budget.knots[: last + 1], np.float64(tokens))
    return _seconds_between(budget, min(max(right, 1), last), tokens) + ragged


@inline
def tokens_per_second(budget):  # type: ignore[no-untyped-def]
    """Return the mean rate at which the current sequences produce tokens."""
    sequences, state = budget.facts[SEQUENCES], budget.state
    return state[MEAN_TOKENS] / state[MEAN_TIME] * sequences / step_seconds(budget, sequences)


@outline
def update_rate(budget, sequences, committed, verified, drafting):  # type: ignore[no-untyped-def]
    """Update the running means with the last step, in which drafts were requested for `sequences` of its sequences.

    committed: their tokens per step. verified: their draft tokens that were verified. drafting: the time by which
    drafting delayed the step.
    """
    facts, state = budget.facts, budget.state
    plain, everyone = facts[TOKENS], facts[SEQUENCES]
    drafted = verified * everyone // sequences
    longer = step_seconds(budget, plain + drafted) - step_seconds(budget, plain) + drafting
    weight = RATE * sequences / (1.0 + RATE * sequences)
    state[MEAN_TOKENS] += weight * (committed / sequences - state[MEAN_TOKENS])
    state[MEAN_TIME] += weight * (1.0 + longer / step_seconds(budget, everyone) - state[MEAN_TIME])


@inline
def _mean_slope(budget, most, tokens):  # type: ignore[no-untyped-def]
    """Return the mean duration of the further tokens of a step of `tokens`, at most `most` of them."""
    plain = budget.facts[TOKENS]
    count = max(1, min(most, np.int64(tokens) - plain))
    return (step_seconds(budget, plain + count) - step_seconds(budget, plain)) / count


@outline
def least_path_prob(budget, most):  # type: ignore[no-untyped-def]
    """Return the smallest path probability of a token to draft.

    most: maximum number of draft tokens of the batch. Where the curve is not convex, verifying less likely tokens may
    be worthwhile; they are not drafted, because that is rare.
    """
    facts, state = budget.facts, budget.state
    if facts[LENGTHS] > 0:
        return np.float32(FLOOR)
    # The smallest mean over all sizes that the step may reach: no number of further tokens takes less time per token.
    slope = min(_mean_slope(budget, most, 0), _mean_slope(budget, most, facts[TOKENS] + most))
    for index in range(facts[KNOTS]):
        if budget.knots[index] > facts[TOKENS]:
            slope = min(slope, _mean_slope(budget, most, budget.knots[index]))
    for index in range(facts[SIZES]):
        if budget.sizes[index] > facts[TOKENS]:
            slope = min(slope, _mean_slope(budget, most, budget.sizes[index]))
    price = np.float32(tokens_per_second(budget) * slope)
    if is_line(budget):
        return price
    return max(price, np.float32(FLOOR), MARGIN * np.float32(state[CUT]))


@inline
def is_line(budget):  # type: ignore[no-untyped-def]
    """Return whether all tokens take equally long, so that those that reach `least_path_prob` are worth verifying."""
    return budget.facts[KNOTS] == 2 and budget.facts[SIZES] == 0 and budget.facts[LENGTHS] == 0


@outline
def _best_count(budget, probs):  # type: ignore[no-untyped-def]
    """Return how many of the likeliest tokens to verify; probs: float32 [T], path probabilities, descending."""
    facts, plain, rate = budget.facts, budget.facts[TOKENS], tokens_per_second(budget)
    start = step_seconds(budget, plain)
    best, best_gain, gain = 0, 0.0, 0.0
    size, right = 0, 1
    for count in range(1, len(probs) + 1):
        gain += probs[count - 1]
        # As `step_seconds`, but continuing at the place of the token before.
        tokens = plain + count
        while size < facts[SIZES] and budget.sizes[size] < tokens:
            size += 1
        if size < facts[SIZES]:
            tokens = budget.sizes[size]
        while right < facts[KNOTS] - 1 and budget.knots[right] < tokens:
            right += 1
        worth = gain - rate * (_seconds_between(budget, right, tokens) + budget.state[RAGGED] - start)
        if worth > best_gain:
            best, best_gain = count, worth
    return best


@outline
def _best_length(budget, probs, offsets):  # type: ignore[no-untyped-def]
    """Return the length to pad all drafts to; probs and offsets as in `select`."""
    facts = budget.facts
    plain, rate = facts[TOKENS], tokens_per_second(budget)
    longest = 0
    for index in range(len(offsets) - 1):
        longest = max(longest, offsets[index + 1] - offsets[index])
    gains = np.zeros(longest + 1)
    for index in range(len(offsets) - 1):
        for place in range(offsets[index], offsets[index + 1]):
            gains[place - offsets[index] + 1] += probs[place]
    best, best_worth, gain, counted = 0, -np.inf, 0.0, 0
    for index in range(facts[LENGTHS]):
        length = budget.lengths[index]
        while counted < min(length, longest):
            counted += 1
            gain += gains[counted]
        worth = gain - rate * step_seconds(budget, plain + length * facts[SEQUENCES])
        if worth > best_worth:
            best, best_worth = length, worth
    return best


@outline
def select(budget, probs, offsets, lengths):  # type: ignore[no-untyped-def]
    """Write how many tokens of each draft to verify; return their sum.

    probs: float32 [T], path probabilities, not ascending within a draft. offsets: int64 [B + 1], into `probs`. lengths:
    int64 [B], written.
    """
    if budget.facts[LENGTHS] > 0:
        most = _best_length(budget, probs, offsets)
        total = 0
        for index in range(len(lengths)):
            lengths[index] = min(most, offsets[index + 1] - offsets[index])
            total += lengths[index]
    else:
        likeliest = np.sort(probs)[::-1]
        total = _best_count(budget, likeliest)
        _cut_drafts(probs, offsets, lengths, likeliest, total)
        state = budget.state
        if total == len(probs):
            state[CUT] *= CUT_DECAY
        else:
            state[CUT] += CUT_RATE * (likeliest[total] - state[CUT])
    budget.state[WITHHELD] += len(probs) - total
    return total


@inline
def _cut_drafts(probs, offsets, lengths, likeliest, total):  # type: ignore[no-untyped-def]
    """Write the lengths of drafts that together have the `total` likeliest tokens."""
    least = likeliest[total - 1] if total > 0 else np.float32(np.inf)
    equal = 0
    for place in range(total):
        equal += likeliest[place] == least
    for index in range(len(lengths)):
        length = 0
        for place in range(offsets[index], offsets[index + 1]):
            if probs[place] < least or (probs[place] == least and equal == 0):
                break
            equal -= probs[place] == least
            length += 1
        lengths[index] = length


@kernel(Longs, Floats, Longs, Longs, returns=Int)
def select_drafts(addresses, probs, offsets, selected):  # type: ignore[no-untyped-def]
    """See `select`. The first argument of this and the following kernels has the addresses of a `Budget`."""
    return select(open_budget(addresses), probs, offsets, selected)


@kernel(Longs, Int, returns=FloatPair)
def step_price(addresses, most):  # type: ignore[no-untyped-def]
    """Return `tokens_per_second` and `least_path_prob`."""
    budget = open_budget(addresses)
    return tokens_per_second(budget), np.float64(least_path_prob(budget, most))


@kernel(Longs, Int, returns=Float)
def seconds_of(addresses, tokens):  # type: ignore[no-untyped-def]
    """Return `step_seconds`."""
    return step_seconds(open_budget(addresses), tokens)


@kernel(Longs, Int, Int, Int, returns=Float)
def saved_steps(addresses, accepted, tokens, drafted):  # type: ignore[no-untyped-def]
    """See `TokenBudget.saved`."""
    budget = open_budget(addresses)
    sequences = budget.facts[SEQUENCES]
    longer = step_seconds(budget, tokens) - step_seconds(budget, tokens - drafted)
    return accepted / sequences - longer / step_seconds(budget, sequences)


@kernel(Longs, Tokens, Tokens, Tokens, Int, returns=types.UniTuple(Float, 3))
def drafts_outcome(addresses, offsets, verified, steps, tokens):  # type: ignore[no-untyped-def]
    """Return what the drafts of a step of a number of tokens led to, given arrays of `ssd.types.Progress`.

    These are the number of steps of the sequences that committed tokens, the time that was saved, see
    `TokenBudget.saved`, and the expected duration as a multiple of that of a step without drafts. steps: empty if each
    sequence took one step.
    """
    budget = open_budget(addresses)
    sequences, taken, drafted, longest = budget.facts[SEQUENCES], np.int64(0), np.int64(0), np.int64(0)
    for index in range(len(verified)):
        drafted += np.int64(verified[index])
        longest = max(longest, np.int64(verified[index]))
        if offsets[index + 1] > offsets[index]:
            taken += np.int64(steps[index]) if len(steps) else np.int64(1)
    for index in range(budget.facts[LENGTHS]):
        if budget.lengths[index] >= longest:
            drafted = len(verified) * budget.lengths[index]
            break
    plain, expected = step_seconds(budget, sequences), step_seconds(budget, tokens)
    longer = expected - step_seconds(budget, tokens - drafted)
    accepted = np.int64(offsets[len(verified)]) - taken
    return np.float64(taken), accepted / sequences - longer / plain, expected / plain


@kernel(Longs, Int, Int, Float, returns=Float)
def largest_saving(addresses, longest, rows, position):  # type: ignore[no-untyped-def]
    """See `TokenBudget.largest_saving`."""
    budget, best = open_budget(addresses), -np.inf
    sequences, plain = budget.facts[SEQUENCES], budget.facts[TOKENS]
    one, before = step_seconds(budget, sequences), step_seconds(budget, plain)
    for length in range(1, longest + 1):
        longer = step_seconds(budget, plain + rows + length * sequences) - before
        best = max(best, length * (1.0 - position) - longer / one)
    return best


@kernel(Longs, Int, Float, Int, Float, returns=Nothing)
def record_rate(addresses, sequences, committed, verified, drafting):  # type: ignore[no-untyped-def]
    """See `update_rate`."""
    update_rate(open_budget(addresses), sequences, committed, verified, drafting)
