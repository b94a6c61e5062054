"""What the engine's selection of draft tokens learns from steps, and when it skips the drafter."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.plan import SequencePlan, StepPlan
from engine.speculation.selection import DraftSelection, path_prob
from ssd.types import DraftBatch, Path
from tests.curves import curve_of, line

PATHS = st.lists(st.lists(st.floats(0.01, 1.0), max_size=4), min_size=1, max_size=3)
CHEAP = line(0.005)


def plan_of(sequences=1, *, verified=0, room=16, prompt_tokens=0, **settings):
    """A step of sequences that verify `verified` tokens each."""
    entries = [
        SequencePlan(None, 9, 1, produces=True, draft_room=room, max_verified=verified) for _ in range(sequences)
    ]
    if prompt_tokens:
        entries.append(SequencePlan(None, 0, prompt_tokens, produces=False))
    return StepPlan(entries, **settings)


def drafts_of(*paths):
    return DraftBatch.from_paths([Path(np.arange(len(path), dtype=np.uint32), np.array(path)) for path in paths])


def slow_path_prob(accept_prob, parents, offsets):
    """Naive twin of `path_prob`: one token after the other."""
    whole = []
    for start, end in itertools.pairwise(offsets):
        for at in range(start, end):
            whole.append(accept_prob[at] * (1.0 if parents[at] < 0 else whole[start + parents[at]]))
    return whole


@given(PATHS, st.data())
def test_path_prob_is_the_product_along_the_path(drafts, data):
    accept_prob, offsets = np.array([prob for draft in drafts for prob in draft]), np.cumsum([0, *map(len, drafts)])
    parents = [data.draw(st.integers(-1, index - 1)) for draft in drafts for index in range(len(draft))]
    found = path_prob(accept_prob, np.array(parents, np.int32), offsets)
    np.testing.assert_allclose(found, slow_path_prob(accept_prob, parents, offsets), rtol=1e-9)


def test_tokens_of_prompts_and_extra_rows_are_part_of_the_step():
    """Verification is free up to 20 tokens."""
    drafts, usable = drafts_of([0.9] * 16), np.array([16])
    for prompt_tokens, extra_rows, verified in ((0, 0, 16), (10, 0, 9), (6, 6, 7), (0, 19, 0)):
        selection = DraftSelection(curve_of([(1, 1.0), (20, 1.0), (21, 9.0)]))
        plan = plan_of(prompt_tokens=prompt_tokens, extra_rows=extra_rows)
        assert selection.select(plan, drafts, usable).tolist() == [verified]


def test_the_price_of_a_step_is_that_of_its_sequences():
    selection = DraftSelection(line(0.01, 0.99))
    assert selection.price(plan_of(1)).min_path_prob == pytest.approx(1.5 * 0.01)
    many = selection.price(plan_of(11))
    assert many.tokens_per_second == pytest.approx(1.5 * 11 / 1.1)
    assert many.min_path_prob == pytest.approx(1.5 * 11 / 1.1 * 0.01)
    assert many.is_worthwhile(1.6, 0.1)
    assert not many.is_worthwhile(1.4, 0.1)


@pytest.mark.parametrize("price", [0.002, 0.02, 0.2])
def test_drafts_that_are_never_accepted_take_little_time_and_are_retried(price):
    selection, drafts = DraftSelection(line(price)), drafts_of([1.0] * 16)
    spent = []
    for _ in range(2000):
        plan = plan_of()
        if not (plan := plan_of(is_backing_off=selection.is_backing_off(1))).is_backing_off:
            selection.price(plan)
            verified = int(selection.select(plan, drafts, np.array([16]))[0])
            plan = plan_of(verified=verified, is_drafting=True)
            spent.append(verified)
        else:
            spent.append(0)
        selection.record(plan, 0, 1, 1 + price * (1 + spent[-1]))
    assert price * sum(spent) / len(spent) < 0.02
    assert max(spent[-500:]) > 0


def calls_in(selection, steps, *, accepted, drafting_s):
    """Return the steps in which the drafter is called."""
    calls = []
    for step in range(steps):
        if selection.is_backing_off(1):
            selection.record(plan_of(is_backing_off=True), 0, 1, 1.0)
        else:
            calls.append(step)
            plan = plan_of(verified=accepted, is_drafting=True, drafting_s=drafting_s)
            selection.record(plan, accepted, 1 + accepted, 1.0)
    return calls


def test_a_useless_drafter_takes_a_small_part_of_the_time():
    calls = calls_in(DraftSelection(CHEAP), 20_000, accepted=0, drafting_s=0.1)
    assert 0 < 0.1 * len(calls) / 20_000 < 0.012
    assert calls[-1] > 19_000


@pytest.mark.parametrize(("drafting_s", "pays"), [(0.9, True), (1.1, False)])
def test_no_backoff_if_accepted_tokens_save_more_time_than_drafting_takes(drafting_s, pays):
    # A step has one accepted token, which saves a step.
    selection = DraftSelection(CHEAP)
    assert (len(calls_in(selection, 200, accepted=1, drafting_s=drafting_s)) == 200) == pays


@pytest.mark.parametrize(("extra_rows", "pays"), [(90, True), (110, False)])
def test_the_time_of_extra_rows_counts_as_drafting(extra_rows, pays):
    # 100 rows take as long as the step without them, and a step has one accepted token.
    selection = DraftSelection(line(0.01, 0.99))
    for _ in range(100):
        plan = plan_of(is_drafting=True, extra_rows=extra_rows)
        selection.record(plan, 1, 2, 1.0)
    assert selection.is_backing_off(1) is not pays


@pytest.mark.parametrize(("sequences", "steps"), [(1, 6), (2, 3), (16, 3)])
def test_a_trial_with_more_sequences_has_fewer_steps(sequences, steps):
    selection = DraftSelection(CHEAP)
    made = 0
    while not selection.is_backing_off(sequences):
        selection.record(plan_of(sequences, is_drafting=True, drafting_s=9.0 * sequences), 0, sequences, 1.0)
        made += 1
    assert made == steps


def test_a_pause_of_a_large_batch_does_not_stop_drafts_of_a_small_one():
    selection = DraftSelection(CHEAP)
    for _ in range(20):
        selection.record(plan_of(16, is_drafting=True, drafting_s=16.0), 0, 16, 1.0)
    assert selection.is_backing_off(16)
    assert selection.is_backing_off(31)
    assert not selection.is_backing_off(15)
    assert not selection.is_backing_off(32)


def test_a_drafter_that_becomes_useful_is_called_in_every_step_again():
    selection = DraftSelection(CHEAP)
    calls_in(selection, 2000, accepted=0, drafting_s=0.01)
    calls = calls_in(selection, 400, accepted=1, drafting_s=0.01)
    assert calls[-100:] == list(range(300, 400))


def test_calibration_recovers_during_backoff():
    selection, drafts = DraftSelection(CHEAP), drafts_of([1.0] * 16)
    for _ in range(100):
        selection.select(plan_of(), drafts, np.array([16]))
        selection.record(plan_of(verified=16), 0, 1, 1.0)
    lost = selection.calibration
    for _ in range(100):
        selection.record(plan_of(), 0, 1, 1.0)
    assert lost < 0.1
    assert selection.calibration > 2 * lost


def test_calibrated_drafts_keep_their_probabilities():
    selection, drafts = DraftSelection(CHEAP), drafts_of([0.9, 0.9, 0.9], [0.5])
    rng = np.random.default_rng(0)
    for _ in range(500):
        assert selection.select(plan_of(2), drafts, np.array([3, 1])).tolist() == [3, 1]
        accepted = int(np.minimum.accumulate(rng.random(3) < 0.9).sum()) + int(rng.random() < 0.5)
        selection.record(plan_of(2, verified=2), accepted, 2 + accepted, 1.0)
    assert selection.calibration > 0.85


def test_tokens_that_cannot_be_verified_do_not_count_as_expected():
    selection, drafts = DraftSelection(CHEAP), drafts_of([1.0] * 9, [1.0] * 9)
    for _ in range(500):
        assert selection.select(plan_of(2), drafts, np.array([4, 0])).tolist() == [4, 0]
        selection.record(plan_of(2, verified=2), 4, 6, 1.0)
    assert selection.calibration == pytest.approx(1)
