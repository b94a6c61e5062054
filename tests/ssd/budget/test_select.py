"""The tokens that a budget selects, and the prices that it computes, against exhaustive search."""

import itertools
from bisect import bisect_left
from operator import mul

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.budget.curve import StepCurve
from ssd.budget.padding import Padding
from ssd.budget.token_budget import TokenBudget
from tests.curves import curve_of, line

probs = st.floats(1 / 512, 1.0, width=32)


@st.composite
def curves(draw, lengths=False):
    """Return a curve that never decreases, with or without padding; steps with drafts may take longer."""
    knots = [1, *sorted(draw(st.sets(st.integers(2, 40), min_size=1, max_size=5)))]
    seconds = list(itertools.accumulate(draw(st.floats(0.01, 1.0)) for _ in knots))
    sizes = sorted(draw(st.sets(st.integers(1, 30), max_size=4)))
    padding = (
        Padding(lengths=tuple(sorted(draw(st.sets(st.integers(0, 5), min_size=1))))) if lengths else Padding(sizes)
    )
    curve = curve_of(list(zip(knots, seconds, strict=True)), draw(st.sampled_from([0.0, 0.1])), padding)
    for duration in draw(st.lists(st.floats(0.01, 1.0), max_size=3)):
        assert curve.record(2, 2, duration)
        assert curve.record(3, 2, 2 * duration)
    return curve


@st.composite
def batches(draw):
    """Return path probabilities of drafts, each of which does not ascend."""
    return [sorted(draw(st.lists(probs, max_size=4)), reverse=True) for _ in range(draw(st.integers(1, 3)))]


def seconds_slowly(curve, tokens, sequences):
    """Return the duration of a step."""
    sizes, x, y = curve.padding(sequences).sizes, curve.knots.tolist(), curve.row(sequences).tolist()
    ragged = curve.ragged_seconds(sequences) if tokens > sequences else 0.0
    tokens = next((size for size in sizes if size >= tokens), tokens)
    right = min(max(bisect_left(x, tokens), 1), len(x) - 1)
    return ragged + y[right - 1] + (tokens - x[right - 1]) * (y[right] - y[right - 1]) / (x[right] - x[right - 1])


def budget_of(curve, sequences, other_tokens=0):
    budget = TokenBudget(curve)
    budget.prepare(sequences, other_tokens)
    return budget


def select(budget, drafts):
    offsets = np.cumsum([0, *map(len, drafts)])
    return budget.select(np.array([prob for draft in drafts for prob in draft], np.float32), offsets).tolist()


def value(budget, drafts, lengths, sequences, plain, tokens):
    """Return the gain of a selection, less what its time is worth."""
    gain = sum(sum(draft[:length]) for draft, length in zip(drafts, lengths, strict=True))
    longer = seconds_slowly(budget.curve, tokens, sequences) - seconds_slowly(budget.curve, plain, sequences)
    return gain - budget.tokens_per_second * longer


@given(curves(), batches(), st.integers(0, 5), st.integers(0, 4))
def test_no_other_selection_is_worth_more(curve, drafts, others, other_tokens):
    sequences = len(drafts) + others
    budget, plain = budget_of(curve, sequences, other_tokens), sequences + other_tokens
    selected = select(budget, drafts)

    def worth(lengths):
        return value(budget, drafts, lengths, sequences, plain, plain + sum(lengths))

    best = max(worth(lengths) for lengths in itertools.product(*(range(len(draft) + 1) for draft in drafts)))
    assert worth(selected) == pytest.approx(best, abs=1e-5)
    assert budget.totals.withheld == sum(map(len, drafts)) - sum(selected)


@given(curves(lengths=True), batches())
def test_no_other_length_is_worth_more_where_drafts_are_padded(curve, drafts):
    sequences = len(drafts)
    budget = budget_of(curve, sequences)
    selected = select(budget, drafts)

    def worth(length):
        lengths = [min(length, len(draft)) for draft in drafts]
        return value(budget, drafts, lengths, sequences, sequences, sequences * (1 + length)), lengths

    best, _ = max(map(worth, curve.padding(sequences).lengths))
    chosen = [gain for gain, lengths in map(worth, curve.padding(sequences).lengths) if lengths == selected]
    assert max(chosen) == pytest.approx(best, abs=1e-5)


def test_drafts_grow_to_half_of_the_probability_at_which_recent_batches_were_cut():
    budget = budget_of(curve_of([(1, 1.0), (4, 1.0), (5, 2.0)]), 1)
    for _ in range(50):
        assert select(budget, [[0.9, 0.8, 0.7, 0.4, 0.4]]) == [3]
    assert budget.price(8).min_path_prob == pytest.approx(0.2, rel=0.01)
    for _ in range(50):
        assert select(budget, [[0.9, 0.8]]) == [2]
    assert budget.price(8).min_path_prob < 0.01


@st.composite
def convex_curves(draw):
    """Return a curve on which each token takes at least as long as the one before."""
    knots = [1, *sorted(draw(st.sets(st.integers(2, 40), min_size=1, max_size=5)))]
    slopes = sorted(draw(st.floats(0.001, 1.0)) for _ in knots[1:])
    seconds = itertools.accumulate(map(mul, slopes, np.diff(knots)), initial=draw(st.floats(0.1, 1.0)))
    return curve_of(list(zip(knots, map(float, seconds), strict=True)))


@given(convex_curves(), batches(), st.integers(0, 5))
def test_no_selected_token_is_less_likely_than_the_price_of_the_step(curve, drafts, others):
    budget = budget_of(curve, len(drafts) + others)
    price = budget.price(sum(map(len, drafts))).min_path_prob
    is_exact = price > 0.026  # Less likely tokens are not drafted at first, whatever they cost.
    for draft, length in zip(drafts, select(budget, drafts), strict=True):
        assert not is_exact or all(prob >= 0.999 * price for prob in draft[:length])


@given(curves(), st.integers(1, 9), st.integers(1, 60))
def test_durations_are_those_of_the_curve(curve, sequences, tokens):
    budget = budget_of(curve, sequences)
    expected = seconds_slowly(curve, tokens, sequences)
    assert budget.seconds(tokens) == pytest.approx(expected)
    assert float(curve.seconds(tokens, sequences)) == pytest.approx(expected)


def test_a_token_must_yield_more_than_the_engine_does_in_its_time():
    budget = budget_of(line(0.1, start=0.9), 1)
    for _ in range(10_000):
        budget.record(1, 2.0, 0)
    # A step without drafts takes a second, so there are two tokens per second, and 0.1 seconds are worth 0.2 tokens.
    assert budget.tokens_per_second == pytest.approx(2.0, rel=0.02)
    assert select(budget, [[0.25, 0.21, 0.19, 0.18]]) == [2]
    assert budget.price(32).min_path_prob == pytest.approx(0.2, rel=0.02)


def test_a_fixed_cost_replaces_the_curve_for_one_step():
    budget = TokenBudget(line(0.0001))
    draft = [[0.9, 0.3, 0.1]]
    budget.prepare(1, cost=0.1)
    assert select(budget, draft) == [2]
    budget.prepare(1)
    assert select(budget, draft) == [3]
    for cost in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="greater than 0 and at most 1"):
            budget.prepare(1, cost=cost)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=20))
def test_the_mean_rate_is_that_of_recent_steps(steps):
    curve = line(0.2)
    budget, tokens_mean, time_mean = TokenBudget(curve), 1.5, 1.0
    for sequences, accepted, verified in steps:
        everyone = sequences + 2
        budget.prepare(everyone)
        budget.record(sequences, sequences + accepted, verified)
        weight = 0.001 * sequences / (1 + 0.001 * sequences)
        drafted = verified * everyone // sequences
        longer = float(curve.seconds(everyone + drafted, everyone) - curve.seconds(everyone, everyone))
        relative = 1 + longer / float(curve.seconds(everyone, everyone))
        tokens_mean += weight * ((sequences + accepted) / sequences - tokens_mean)
        time_mean += weight * (relative - time_mean)
    budget.prepare(3)
    assert budget.tokens_per_second == pytest.approx(tokens_mean / time_mean * 3 / float(curve.seconds(3, 3)))


def test_curves_with_too_many_shapes_are_refused():
    with pytest.raises(ValueError, match="at most 256"):
        TokenBudget(StepCurve.constant(0.1, Padding(sizes=tuple(range(1, 300)))))
