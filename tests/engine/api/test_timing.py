"""Where the time of requests goes, by a clock that is set by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.api import timing
from engine.api.messages import RequestTimes
from engine.api.timing import Timing
from engine.engine import StepReport


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def step(clock, noted, began, ended, running=(), produced=()):
    clock.now = ended
    outcomes = [SimpleNamespace(sequence_id=number, tokens=np.zeros(1, np.uint32)) for number in produced]
    noted.stepped(began, [SimpleNamespace(sequence_id=number) for number in running], StepReport(outcomes))


def test_times_are_those_between_the_moments(clock):
    noted = Timing()
    clock.now = 1.0
    noted.begun(5)
    clock.now = 2.0
    noted.begun(6)
    step(clock, noted, 3, 4, running=[5])  # a part of its prompt
    step(clock, noted, 6, 10, running=[5], produced=[5])
    step(clock, noted, 20, 21, running=[])  # preempted
    step(clock, noted, 30, 40, running=[6], produced=[5, 6])  # 5 ended and runs no more
    assert noted.ended(5) == RequestTimes(queue=2, prefill=7, decode=30)
    step(clock, noted, 40, 44, produced=[6])
    assert noted.ended(6) == RequestTimes(queue=28, prefill=10, decode=4)


def test_one_step_is_enough_and_ids_may_return(clock):
    noted = Timing()
    for moment in (0.0, 100.0):
        clock.now = moment
        noted.begun(1)
        step(clock, noted, moment + 1, moment + 3, produced=[1])
        assert noted.ended(1) == RequestTimes(queue=1, prefill=2, decode=0)
    for ran in ([], [1]):  # cancelled while it waited, and while it ran
        clock.now = 200.0
        noted.begun(1)
        step(clock, noted, 201, 202, running=ran)
        noted.dropped(1)
    clock.now = 300.0
    noted.begun(1)
    step(clock, noted, 310, 320, produced=[1])
    assert noted.ended(1) == RequestTimes(queue=10, prefill=10, decode=0)
