"""When drafting stops because it costs more than it saves, and when it is tried again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.budget.backoff import FIRST_ALLOWANCE, MAX_LOSS, MAX_SAVED, TRIAL, Backoff


def run(backoff, steps, saved, drafting):
    """Run steps, and return in which of them drafts were made; saved: by drafts of a step, without drafting."""
    made = []
    for _ in range(steps):
        made.append(not backoff.is_stopped)
        if backoff.is_stopped:
            backoff.record_pause()
        else:
            backoff.record_drafts(saved, drafting)
    return made


def test_drafts_that_save_time_pause_only_for_measurements():
    """The intervals between the pauses grow."""
    assert all(run(Backoff(), 1000, saved=0.5, drafting=0.4))
    made = run(Backoff(runs=(32, 128)), 32 + 1 + 64 + 1 + 3 * (128 + 1), saved=0.5, drafting=0.4)
    lengths = [len(each) for each in "".join(map(str, map(int, made))).split("0")]
    assert lengths == [32, 64, 128, 128, 128, 0]


def test_a_small_loss_stops_drafting_although_it_is_interrupted():
    backoff = Backoff(runs=(8, 8))
    made = run(backoff, 4000, saved=0.0, drafting=0.02)
    assert sum(made[-1000:]) < 500


@pytest.mark.parametrize("drafting", [0.01, 0.1, 1.0])
def test_drafting_that_saves_nothing_costs_a_small_fraction_of_the_time(drafting):
    steps = 20_000
    made = run(Backoff(), steps, saved=0.0, drafting=drafting)
    assert sum(made) * drafting < 0.02 * steps
    assert sum(made[10_000:]) * drafting < 0.012 * 10_000
    assert any(made[10_000:]), "it is still tried"


@given(st.floats(-1, 3), st.floats(0, 3), st.integers(100, 2000))
def test_the_loss_is_limited(saved, drafting, steps):
    backoff, lost = Backoff(), 0.0
    for _ in range(steps):
        if backoff.is_stopped:
            backoff.record_pause()
        else:
            backoff.record_drafts(saved, drafting)
            lost += drafting - saved
    # The costs of a trial and of the step that ends it: for each of the first pauses, and then for each 100 steps.
    assert lost <= (TRIAL + max(0.0, drafting - saved)) * (10 + MAX_LOSS * steps)


def test_what_was_saved_is_lost_again_before_it_stops():
    backoff = Backoff()
    run(backoff, 100, saved=1.0, drafting=0.5)
    made = run(backoff, 100, saved=0.0, drafting=0.5)
    assert made.index(False) == pytest.approx(MAX_SAVED * TRIAL / 0.5, abs=2)


def pauses_of(made):
    return [len(pause) for pause in "".join(" x"[each] for each in made).strip().split("x") if pause]


def test_the_first_trials_follow_each_other_and_later_ones_take_a_small_part_of_the_time():
    pauses = pauses_of(run(Backoff(), 3000, saved=0.0, drafting=0.05))
    assert pauses[: int(FIRST_ALLOWANCE) - 1] == [1]
    assert pauses[4:] == pytest.approx([TRIAL / MAX_LOSS - TRIAL / 0.05] * len(pauses[4:]), abs=2)


def test_a_trial_follows_soon_after_drafting_was_worthwhile():
    backoff = Backoff()
    run(backoff, 3000, saved=0.0, drafting=0.5)
    while backoff.is_stopped:
        backoff.record_pause()
    run(backoff, 50, saved=1.0, drafting=0.5)
    # A trial of 6 steps loses 3, which takes 300 steps without what was saved.
    assert pauses_of(run(backoff, 500, saved=0.0, drafting=0.5))[0] < 150


@pytest.mark.parametrize(("loss", "pause"), [(-1.0, 0), (0.1, 0), (2.0, 1000)])
def test_a_trial_that_would_lose_much_waits_until_it_may(loss, pause):
    backoff = Backoff()
    for _ in range(2):
        backoff.delay_trial(loss)
        assert backoff.pause_steps == pytest.approx(pause, abs=1)
        while backoff.is_stopped:
            backoff.record_pause()
        pause = 0


def test_a_first_call_that_loads_modules_does_not_count():
    backoff = Backoff()
    backoff.record_drafts(0.0, 1000.0)
    assert all(run(backoff, 100, saved=0.2, drafting=0.1))


def test_a_call_that_waited_counts_little_and_slower_calls_for_new_prompts_count():
    backoff = Backoff()
    run(backoff, 10, saved=0.1, drafting=0.1)
    backoff.record_drafts(0.1, 1000.0)
    assert all(run(backoff, 50, saved=0.1, drafting=0.1))
    made = []
    for _ in range(40):
        made += run(backoff, 4, saved=0.15, drafting=0.1) + run(backoff, 1, saved=0.15, drafting=0.5)
    assert not all(made)


def test_the_first_calls_count_once_the_usual_time_is_known():
    made = run(Backoff(min_trial_steps=1), 10, saved=0.0, drafting=0.4)
    assert made.index(False) == 3
