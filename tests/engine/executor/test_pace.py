"""When the pipelined loop waits for what a step produced."""

import pytest

from engine.executor.pace import LATE_LOSS, Pace


def after(steps, *, host_s, accepted, produced=10):
    pace = Pace()
    for _ in range(steps):
        pace.note(host_s, 1.0, accepted, produced)
    return pace


def test_nothing_is_waited_for_until_drafts_are_accepted():
    assert not Pace().waits
    assert not after(10, host_s=0.0, accepted=0).waits


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_step_is_waited_for_if_better_drafts_gain_more_than_the_host_takes(share):
    accepted = int(10 * share)
    assert after(5, host_s=0.99 * LATE_LOSS * share, accepted=accepted).waits
    assert not after(5, host_s=1.01 * LATE_LOSS * share, accepted=accepted).waits


def test_what_was_long_ago_does_not_count():
    pace = after(200, host_s=0.01, accepted=5)
    assert pace.waits
    for _ in range(200):
        pace.note(0.5, 1.0, 5, 10)
    assert not pace.waits
