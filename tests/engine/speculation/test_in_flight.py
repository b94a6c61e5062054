"""Choice between launching a step before or after the results of the previous one are read."""

import pytest

from engine.speculation.in_flight import LATE_LOSS, InFlightDepth


def after(steps, *, host_s, accepted, produced=10):
    depth = InFlightDepth()
    for _ in range(steps):
        depth.record(host_s, 1.0, accepted, produced)
    return depth


def test_steps_are_launched_ahead_while_no_drafts_are_accepted():
    assert InFlightDepth().current == 1
    assert after(10, host_s=0.0, accepted=0).current == 1


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_results_are_read_first_if_late_drafts_lose_more_than_the_host_takes(share):
    accepted = int(10 * share)
    assert after(5, host_s=0.99 * LATE_LOSS * share, accepted=accepted).current == 0
    assert after(5, host_s=1.01 * LATE_LOSS * share, accepted=accepted).current == 1


def test_old_steps_are_forgotten():
    depth = after(200, host_s=0.01, accepted=5)
    assert depth.current == 0
    for _ in range(200):
        depth.record(0.5, 1.0, 5, 10)
    assert depth.current == 1


@pytest.mark.parametrize("fixed", [0, 1])
def test_a_fixed_depth_does_not_change(fixed):
    depth = InFlightDepth(fixed)
    depth.record(0.0 if fixed else 1.0, 1.0, 9, 10)
    assert depth.current == fixed
