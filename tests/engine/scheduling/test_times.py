import numpy as np
import pytest

from engine.executor import eager
from engine.scheduling import report
from engine.scheduling.report import StageTimes
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from ssd.types import NO_LIMITS
from tests.engine.fake_runner import fake_engine


@pytest.fixture
def clock(monkeypatch):
    """A clock that only advances when a test sets it."""
    now = [100.0]
    monkeypatch.setattr(report, "perf_counter", lambda: now[0])
    return now


class SlowDrafter(NoDrafter):
    """Takes 1 s to start, 2 s to draft, and 4 s to finish."""

    limits = NO_LIMITS

    def __init__(self, clock):
        self._clock = clock

    def start(self, sequence_id, prompt):
        self._clock[0] += 1

    def draft(self, progress):
        self._clock[0] += 2
        return super().draft(progress)

    def finish(self, sequence_id, tokens, *, verified=0, learn=True):
        self._clock[0] += 4


def test_a_step_reports_the_durations_of_its_stages(clock, monkeypatch):
    engine = fake_engine(SlowDrafter(clock), None)
    forward, schedule = engine._executor.runner.forward, engine.scheduler.plan

    def slowly(run, seconds):
        def call(*arguments):
            clock[0] += seconds
            return run(*arguments)

        return call

    engine._executor.runner.forward = slowly(forward, 8)
    monkeypatch.setattr(eager, "verify_drafts", slowly(eager.verify_drafts, 16))
    engine.scheduler.plan = slowly(schedule, 32)
    reports = []
    engine.generate([Request(np.array([1, 2], np.uint32), SamplingParams(2, ignore_eos=True))], reports.append)
    assert [report.times for report in reports] == [
        StageTimes(schedule=32, draft=3, forward=8, verify=16, commit=0),
        # There is no room for a draft; the drafter learns of both steps at the end.
        StageTimes(schedule=32, draft=0, forward=8, verify=16, commit=6),
    ]
    assert (reports[1].times.overhead, reports[1].times.total) == (54, 62)
