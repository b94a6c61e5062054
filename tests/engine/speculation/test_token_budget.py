"""Selection of draft tokens against an exhaustive search, and what the budget learns from steps."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.plan import StepPlan
from engine.speculation.step_cost import StepCost
from engine.speculation.token_budget import TokenBudget, path_prob, worth_verifying
from ssd.types import DraftBatch, Path

PROBABILITIES = st.floats(0.01, 1.0)
PATHS = st.lists(st.lists(PROBABILITIES, max_size=4), min_size=1, max_size=3)
RISES = st.lists(st.floats(0, 1.0), min_size=3, max_size=3)


def flat(paths):
    return np.array([accept_prob for path in paths for accept_prob in path]), np.cumsum([0, *map(len, paths)])


def parents_of(paths):
    return np.array([index - 1 for path in paths for index in range(len(path))], np.int32)


def slow_path_prob(accept_prob, parents, offsets):
    """Naive twin of `path_prob`: one token after the other."""
    whole = []
    for start, end in itertools.pairwise(offsets):
        for at in range(start, end):
            whole.append(accept_prob[at] * (1.0 if parents[at] < 0 else whole[start + parents[at]]))
    return whole


@given(PATHS, st.data())
def test_path_prob_is_the_product_along_the_path(drafts, data):
    accept_prob, offsets = flat(drafts)
    parents = [data.draw(st.integers(-1, index - 1)) for draft in drafts for index in range(len(draft))]
    found = path_prob(accept_prob, np.array(parents, np.int32), offsets)
    np.testing.assert_allclose(found, slow_path_prob(accept_prob, parents, offsets), rtol=1e-9)


def tokens_per_second(paths, lengths, tokens, cost):
    gained = sum(float(np.prod(path[: i + 1])) for path, n in zip(paths, lengths, strict=True) for i in range(n))
    return (len(paths) + gained) / float(cost.seconds(tokens + sum(lengths), len(paths)))


@given(PATHS, RISES, st.integers(0, 20), st.floats(0, 0.5))
def test_no_other_selection_is_faster(paths, rises, prompt_tokens, per_sequence):
    cost = StepCost([1, 4, 16, 64], np.cumsum([1.0, *rises]), per_sequence)
    tokens = len(paths) + prompt_tokens
    accept_prob, offsets = flat(paths)
    lengths = worth_verifying(path_prob(accept_prob, parents_of(paths), offsets), offsets, tokens, len(paths), cost)
    assert all(0 <= length <= len(path) for length, path in zip(lengths, paths, strict=True))
    best = max(
        tokens_per_second(paths, choice, tokens, cost)
        for choice in itertools.product(*(range(len(path) + 1) for path in paths))
    )
    assert tokens_per_second(paths, lengths, tokens, cost) == pytest.approx(best)


def test_expensive_tokens_are_not_verified_and_free_ones_are():
    expensive = StepCost([1, 100], [1.0, 100.0])
    offsets = np.array([0, 3])
    assert worth_verifying(np.array([0.9, 0.8, 0.7]), offsets, 1, 1, expensive).tolist() == [0]
    free = StepCost([1, 100], [1.0, 1.0])
    assert worth_verifying(np.array([0.1, 0.01, 0.001]), offsets, 1, 1, free).tolist() == [3]


def test_a_cost_that_is_far_too_high_is_corrected_by_probes():
    truth, budget = StepCost([1, 17], [1.0, 1.1]), TokenBudget(StepCost([1, 17], [1.0, 40.0]))
    drafts, verified = drafts_of([0.95] * 16), []
    for _ in range(400):
        selection = budget.select(drafts, np.array([16]), 1)
        verified.append(int(selection.lengths[0]))
        taken = float(truth.seconds(1 + verified[-1], 1))
        record(budget, 1 + verified[-1], verified[-1] // 2, taken, drafting_s=0.001, is_probe=selection.is_probe)
    assert sum(verified[:19]) == 0
    assert min(verified[-50:]) > 4


def test_a_drafter_that_drafts_nothing_at_a_high_cost_is_asked_at_a_low_one():
    truth = StepCost([1, 2, 4, 8, 16], [1.0, 1.02, 1.05, 1.1, 1.2])
    budget = TokenBudget(StepCost([1, 2, 4, 8, 16], [1.0, 2.1, 4.2, 8.4, 16.8]))  # a disturbed measurement
    costs, verified = [], []
    for _ in range(400):
        usable, is_drafting, is_probe = 0, not budget.is_backing_off, False
        if is_drafting:
            costs.append(budget.cost_of_one_more(1, 1))
            drafts = drafts_of([0.95] * 15 if costs[-1] < 0.5 else [])
            selection = budget.select(drafts, np.diff(drafts.offsets).astype(np.int64), 1)
            usable, is_probe = int(selection.lengths.sum()), selection.is_probe
            verified.append(usable)
        seconds = float(truth.seconds(1 + usable, 1))
        record(budget, 1 + usable, usable, seconds, drafting_s=0.001 if is_drafting else None, is_probe=is_probe)
    assert costs[0] == 1.0
    assert costs[-1] < 0.5
    assert min(verified[-50:]) > 4


def test_probes_are_rare_if_the_cost_is_right():
    budget, drafts = TokenBudget(StepCost([64, 81], [1.0, 1.3])), drafts_of(*[[0.9, 0.9, 0.9, 0.9]] * 64)
    expensive = TokenBudget(StepCost([1, 17], [1.0, 17.0]))
    for _ in range(200):
        assert expensive.select(drafts_of([0.5] * 16), np.array([16]), 1).lengths.sum() == 0  # gains less than 2 tokens
        record(expensive, 1, 0, 1.0, drafting_s=0.001)
    for _ in range(200):
        lengths = budget.select(drafts, np.full(64, 4), 64).lengths
        assert np.count_nonzero(lengths) <= 1
        seconds = 1.0 + 0.3 * int(lengths.sum()) / 17
        record(budget, 64 + int(lengths.sum()), 0, seconds, sequences=64)


def record(budget, tokens, accepted, seconds, *, sequences=1, drafting_s=None, is_probe=False):
    """Record a step; without `drafting_s` the drafter was not called."""
    plan = StepPlan(
        [None] * sequences, is_drafting=drafting_s is not None, is_probe=is_probe, drafting_s=drafting_s or 0.0
    )
    budget.record(plan, tokens, accepted, seconds)


def drafts_of(*paths):
    return DraftBatch.from_paths([Path(np.arange(len(path), dtype=np.uint32), np.array(path)) for path in paths])


CHEAP = StepCost([1, 100], [1.0, 1.5])


@pytest.mark.parametrize("price", [0.002, 0.02, 0.2])
def test_drafts_that_are_never_accepted_take_little_time_and_are_retried(price):
    budget, drafts = TokenBudget(StepCost([1, 101], [1.0, 1.0 + 100 * price])), drafts_of([1.0] * 16)
    spent = []
    for _ in range(2000):
        spent.append(int(budget.select(drafts, np.array([16]), 1).lengths[0]))
        record(budget, 1 + spent[-1], 0, 1.0 + price * spent[-1])
    later = spent[200:]
    assert 0.002 < price * sum(later) / len(later) < 0.04
    assert max(later[-500:]) > 0


def asked_in(budget, steps, *, accepted, drafting_s, step_s=1.0):
    """Return the steps in which the drafter is called."""
    calls = []
    for step in range(steps):
        if budget.is_backing_off:
            record(budget, 1, 0, step_s)
        else:
            calls.append(step)
            record(budget, 1, accepted, step_s, drafting_s=drafting_s)
    return calls


def test_a_useless_drafter_is_called_at_growing_intervals():
    calls = asked_in(TokenBudget(CHEAP), 100, accepted=0, drafting_s=0.1)
    assert calls[:6] == [0, 2, 6, 14, 30, 46]
    assert np.diff(calls[4:]).tolist() == [16] * len(np.diff(calls[4:]))


@pytest.mark.parametrize(("drafting_s", "pays"), [(0.4, True), (0.6, False)])
def test_no_backoff_if_accepted_tokens_save_more_time_than_drafting_takes(drafting_s, pays):
    # A step produces one accepted token and the bonus token, so the draft saves half of a step.
    assert (len(asked_in(TokenBudget(CHEAP), 64, accepted=1, drafting_s=drafting_s)) == 64) == pays


@pytest.mark.parametrize(("extra_rows", "pays"), [(90, True), (110, False)])
def test_the_time_of_extra_rows_counts_as_drafting(extra_rows, pays):
    # 100 rows take as long as the step without them, and a step has one accepted token and the bonus token.
    cost = StepCost([1, 201], [1.0, 3.0])
    budget, plan = TokenBudget(cost), StepPlan([None], is_drafting=True, extra_rows=extra_rows)
    for _ in range(20):
        budget.record(plan, 1 + extra_rows, 1, float(cost.seconds(1 + extra_rows, 1)))
    assert budget.is_backing_off is not pays


def test_a_drafter_that_becomes_useful_is_called_in_every_step_again():
    budget = TokenBudget(CHEAP)
    asked_in(budget, 200, accepted=0, drafting_s=0.01)
    calls = asked_in(budget, 40, accepted=1, drafting_s=0.01)
    assert calls[0] < 16
    assert calls[1:] == list(range(calls[1], 40))


def test_calibration_recovers_during_backoff():
    budget, drafts = TokenBudget(CHEAP), drafts_of([1.0] * 16)
    for _ in range(100):
        budget.select(drafts, np.array([16]), 1)
        record(budget, 17, 0, 1.0)
    lost = budget.calibration
    for _ in range(100):
        record(budget, 1, 0, 1.0)
    assert lost < 0.1
    assert budget.calibration > 2 * lost


def test_calibrated_drafts_keep_their_probabilities():
    budget, drafts = TokenBudget(CHEAP), drafts_of([0.9, 0.9, 0.9], [0.5])
    rng = np.random.default_rng(0)
    for _ in range(500):
        assert budget.select(drafts, np.array([3, 1]), 2).lengths.tolist() == [3, 1]
        on_path = np.minimum.accumulate(rng.random(3) < 0.9).sum()
        record(budget, 6, int(on_path) + int(rng.random() < 0.5), 1.0, sequences=2)
    assert budget.calibration > 0.85


def test_tokens_that_cannot_be_verified_do_not_count_as_expected():
    budget, drafts = TokenBudget(CHEAP), drafts_of([1.0] * 9, [1.0] * 9)
    for _ in range(500):
        assert budget.select(drafts, np.array([4, 0]), 2).lengths.tolist() == [4, 0]
        record(budget, 6, 4, 1.0, sequences=2)
    assert budget.calibration == pytest.approx(1)


def test_the_cost_of_one_more_is_that_of_the_step_cost():
    assert TokenBudget(CHEAP).cost_of_one_more(51, 10) == CHEAP.of_one_more(51, 10)
