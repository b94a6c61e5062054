"""What a token budget learns from the progress of an engine: the curve, and when drafting is not worthwhile."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.budget.curve import StepCurve
from ssd.budget.padding import Padding
from ssd.budget.token_budget import TokenBudget
from ssd.kernels.budget import drafts_outcome
from ssd.types import StepTime
from tests.replay import progress_of

DRAFTED = 4


def progress(committed, *times, sequences=2):
    """Return progress of some sequences, each of which committed this many tokens of a verified draft."""
    steps = progress_of(dict.fromkeys(range(sequences), range(committed)), limit=0, verified=DRAFTED)
    return replace(steps, step_times=times)


def step(drafting_s, seconds=0.1, sequences=2):
    return StepTime(sequences * (1 + DRAFTED), sequences, seconds, drafting_s)


def pauses_after(committed, drafting_s, steps=30):
    """Return the first pause that a budget asks for within some steps; 0: none."""
    budget = TokenBudget(StepCurve.unknown())
    for _ in range(20):
        budget.curve.record(2, 2, 0.1)
        budget.curve.record(2 * (1 + DRAFTED), 2, 0.1)
    return max(budget.learn(progress(committed, step(drafting_s))) for _ in range(steps))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8), st.integers(1, 3)), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([(), (2, 8)]),
    st.integers(0, 20),
)
def test_the_outcome_of_a_step_is_that_of_its_arrays(sequences, has_steps, lengths, prompt):
    """Each sequence: tokens it committed, its verified draft tokens, and its steps."""
    curve = StepCurve.from_table([1, 8], [1, 64], np.array([[1.0, 3.0], [2.0, 5.0]]), Padding(lengths=lengths))
    budget, count = TokenBudget(curve), len(sequences)
    budget.prepare(count)
    committed, verified, steps = np.array(sequences, np.uint32).T.copy()
    offsets = np.append(0, np.cumsum(committed)).astype(np.uint32)
    tokens = curve.step_tokens(verified.astype(np.int64), prompt)
    given_steps = steps if has_steps else steps[:0]
    taken, saved, longer = drafts_outcome(budget.addresses, offsets, verified, given_steps, tokens)
    assert taken == sum((steps if has_steps else np.ones(count))[committed > 0])
    plain, expected = (float(curve.seconds(size, count)) for size in (count, tokens))
    drafts_s = expected - float(curve.seconds(count + prompt, count))
    assert saved == pytest.approx((committed.sum() - taken) / count - drafts_s / plain)
    assert longer == pytest.approx(expected / plain)


def test_an_answer_that_is_always_late_saves_nothing():
    """Two steps without a draft commit two tokens; the wait for each answer is lost."""
    budget = TokenBudget(StepCurve.from_table([1, 100], [1, 100], np.ones((2, 2))))
    late = replace(progress(2), verified=np.zeros(2, np.uint32), steps=np.full(2, 2, np.uint32))
    late.step_times = [StepTime(2, 2, 1.0, 0.1), StepTime(2, 2, 1.0)]
    assert any(budget.learn(late) for _ in range(40))


@pytest.mark.parametrize("impossible", [float("nan"), float("inf"), -1.0, 1e12])
def test_impossible_times_pause_nothing(impossible):
    budget = TokenBudget(StepCurve.unknown())
    assert [budget.learn(progress(1, step(1e9, impossible))) for _ in range(100)] == [0] * 100
    assert budget.totals.ignored == 100


def test_a_fixed_cost_pauses_drafting_as_a_learned_curve_does():
    budget = TokenBudget(StepCurve.constant(0.001))
    assert any(budget.learn(progress(1, step(0.05))) for _ in range(40))
    budget = TokenBudget(StepCurve.constant(0.001))
    assert not any(budget.learn(progress(3, step(0.05))) for _ in range(40))


def test_durations_are_recorded():
    budget = TokenBudget(StepCurve.unknown())
    budget.learn(progress(1, *[step(0.0, seconds) for seconds in (0.1, 0.1, -1.0)]))
    assert budget.totals.ignored == 1
    assert budget.totals.sizes[:, 0].sum() == 2


@pytest.mark.parametrize(
    ("committed", "drafting_s", "least", "most"),
    [
        (1, 0.05, 2, 1 << 20),
        (3, 0.05, 1, 1),  # A single step without drafts is measured.
        (3, 0.5, 2, 1 << 20),
        (1, 0.0, 0, 0),  # The time of drafting is not known.
        *((1, impossible, 0, 0) for impossible in (float("nan"), float("inf"), -1.0, 1e12)),
    ],
)
def test_drafting_is_paused_where_it_costs_more_than_it_saves(committed, drafting_s, least, most):
    assert least <= pauses_after(committed, drafting_s) <= most


def test_after_a_pause_drafting_is_tried_again():
    budget = TokenBudget(StepCurve.from_table([1, 100], [1, 100], np.ones((2, 2))))
    found = [budget.learn(progress(1, step(0.5, 1.0))) for _ in range(12)]
    first = next(index for index, pause in enumerate(found) if pause)
    assert found[first + 1] == 0, "the step after a pause is a trial"


def test_a_part_of_the_batch_has_the_time_of_the_whole_step():
    """Sequences of a step that are not in the batch of a drafter save nothing, but its time is theirs, too."""
    budget = TokenBudget(StepCurve.from_table([1, 100], [1, 100], np.ones((2, 2))))
    shared = replace(progress(3, sequences=1), step_times=[StepTime(60, 50, 1.0, 0.5)])
    assert any(budget.learn(shared) for _ in range(40))
