"""What the engine's selection of draft tokens learns from steps, and when it skips the drafter."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.selection import DraftSelection, path_prob
from ssd.types import DraftBatch, DraftLimits, Path
from tests.curves import curve_of, line
from tests.engine.steps import counted_plan as plan_of

PATHS = st.lists(st.lists(st.floats(0.01, 1.0), max_size=4), min_size=1, max_size=3)
CHEAP = line(0.005)


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
    np.testing.assert_allclose(found, slow_path_prob(accept_prob, parents, offsets), rtol=1e-5)


def test_tokens_of_prompts_and_extra_rows_are_part_of_the_step():
    """Verification is free up to 20 tokens."""
    drafts, usable = drafts_of([0.9] * 16), np.array([16])
    for prompt_tokens, extra_rows, verified in ((0, 0, 16), (10, 0, 9), (6, 6, 7), (0, 19, 0)):
        selection = DraftSelection(curve_of([(1, 1.0), (20, 1.0), (21, 9.0)]))
        plan = plan_of(prompt_tokens=prompt_tokens, extra_rows=extra_rows)
        assert selection.select(plan, drafts, usable).tolist() == [verified]


def test_the_price_of_a_step_is_that_of_its_sequences():
    selection = DraftSelection(line(0.01, 0.99))
    one, many = (selection.price(plan) for plan in (plan_of(1), plan_of(11)) if selection.admits(plan))
    assert one.min_path_prob == pytest.approx(1.5 * 0.01)
    assert many.tokens_per_second == pytest.approx(1.5 * 11 / 1.1)
    assert many.min_path_prob == pytest.approx(1.5 * 11 / 1.1 * 0.01)
    assert many.is_worthwhile(1.6, 0.1)
    assert not many.is_worthwhile(1.4, 0.1)


@pytest.mark.parametrize("price", [0.002, 0.02, 0.2])
def test_drafts_that_are_never_accepted_take_little_time_and_are_retried(price):
    selection, drafts = DraftSelection(line(price)), drafts_of([1.0] * 16)
    spent = []
    for _ in range(2000):
        if not (plan := plan_of(is_backing_off=not selection.admits(plan_of()))).is_backing_off:
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
        if not selection.admits(plan_of()):
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
        selection.record(plan_of(is_drafting=True, extra_rows=extra_rows), 1, 2, 1.0)
    plan = plan_of(extra_rooms=np.array([extra_rows]))
    assert selection.admits(plan), "drafts without extra rows are still tried"
    assert plan.extra_rooms[0] == (extra_rows if pays else 0)


@pytest.mark.parametrize(("sequences", "steps"), [(1, 6), (2, 3), (16, 3)])
def test_a_trial_with_more_sequences_has_fewer_steps(sequences, steps):
    selection = DraftSelection(CHEAP)
    made = 0
    while selection.admits(plan_of(sequences)):
        selection.record(plan_of(sequences, is_drafting=True, drafting_s=9.0 * sequences), 0, sequences, 1.0)
        made += 1
    assert made == steps


def test_a_pause_of_a_large_batch_does_not_stop_drafts_of_a_small_one():
    selection = DraftSelection(CHEAP)
    for _ in range(20):
        selection.record(plan_of(16, is_drafting=True, drafting_s=0.5), 0, 16, 1.0)
    assert [selection.admits(plan_of(count)) for count in (15, 16, 31, 32)] == [True, False, False, True]


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


@pytest.mark.parametrize(("depth", "pays"), [(2, True), (1, False)])
def test_extra_rows_that_cannot_pay_are_not_tried_and_this_is_said_once(depth, pays):
    # The rows take half as long as a step without drafts, and verifying a token of each sequence half as long, too.
    selection = DraftSelection(line(0.25, 0.5), DraftLimits(depth=depth), (said := []).append)
    for _ in range(3):
        plan = plan_of(2, extra_rooms=np.array([1, 1]))
        assert selection.admits(plan), "drafts without extra rows may pay"
        assert plan.extra_rooms[0] == (1 if pays else 0)
    assert said == ([] if pays else [said[0]])
    assert pays or ("with 2 requests at once" in said[0] and "(1 for each request)" in said[0])


@pytest.mark.parametrize(("position_steps", "pays"), [(0.5, True), (1.0, False)])
def test_a_network_as_slow_as_the_target_is_never_called(position_steps, pays):
    limits = DraftLimits(4, position_steps, cause="it is a copy")
    selection = DraftSelection(line(0.01, 0.99), limits, (said := []).append)
    assert selection.admits(plan_of()) == pays
    assert pays or (len(said) == 1 and said[0].startswith("with 1 request at once nothing is drafted:"))
    assert pays or said[0].endswith("; it is a copy")


def test_extra_rows_that_may_pay_are_tried_when_the_trial_takes_a_small_part_of_the_time():
    """A step with the rows takes 3 times as long as one without, so a trial of 3 steps loses 6 steps."""
    selection, rows = DraftSelection(line(0.05, 0.9)), []
    for _ in range(900):
        plan = plan_of(2, extra_rooms=np.array([20, 20]))
        assert selection.admits(plan), "drafts without extra rows cost nothing"
        rows.append(2 * plan.extra_rooms[0])
        selection.record(plan_of(2, is_drafting=True, extra_rows=rows[-1]), 0, 2, 1.0 + 0.05 * rows[-1])
    assert 390 < rows.index(40) < 410
    assert rows.count(40) == 3


def test_a_costly_network_is_not_tried_with_each_number_of_sequences():
    selection = DraftSelection(CHEAP)
    calls = 0
    for sequences in (1, 2, 4, 8, 16):
        while selection.admits(plan_of(sequences)):
            selection.record(plan_of(sequences, is_drafting=True, drafting_s=9.0), 0, sequences, 1.0)
            calls += 1
    assert calls == 6
