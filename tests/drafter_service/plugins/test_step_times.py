"""How plug-ins measure the steps of their hosts, and what they tell the drafter."""

import pytest

from drafter_service.plugins.options import HostLimits, RequestOptions
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.settings import PluginSettings
from drafter_service.plugins.step_clock import StepClock
from drafter_service.transport.wire import MAX_STEP_TIMES
from ssd.types import DraftBatch
from tests.drafter_service.plugins.host_simulator import RecordingDrafter

LOOP = [1, 2, 3, 4, 5, 1, 2, 3]


class Drafter(RecordingDrafter):
    """A drafter without drafts that keeps the progress it is told, takes its time, and asks for pauses."""

    def __init__(self, clock):
        super().__init__()
        self.seen, self.pause_steps, self._clock = [], 0, clock

    def draft(self, progress):
        self.seen.append(progress)
        self._clock.now += 0.25
        drafts = DraftBatch.empty(len(progress.sequence_ids))
        drafts.pause_steps = self.pause_steps
        return drafts


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in ("session", "step_clock"):
        monkeypatch.setattr(f"drafter_service.plugins.{module}.perf_counter", clock)
    return clock


@pytest.fixture
def drafters(clock):
    return {}


@pytest.fixture
def session(clock, drafters):
    reports = []
    session = HostSession(
        PluginSettings(),
        HostLimits(8, 50),
        reports.append,
        lambda _, salt: drafters.setdefault(salt, Drafter(clock)),
    )
    yield session
    session.close()
    assert not reports


def step(session, *names):
    return session.draft([(name, LOOP) for name in names])


def test_steps_are_sent_once_with_the_time_of_drafting_before_them(session, drafters):
    session.start("a", LOOP)
    step(session, "a")
    session.record_step(9, 1, 0.5)
    step(session, "a")
    step(session, "a")
    first, second, third = (progress.step_times for progress in drafters[""].seen)
    assert (list(first), list(third)) == ([], [])
    assert [tuple(each) for each in second] == [(9, 1, 0.5, 0.25)]


def test_the_last_steps_are_kept_while_no_drafts_are_requested(session, drafters):
    session.start("a", LOOP)
    for size in range(1, MAX_STEP_TIMES + 11):
        session.record_step(size, 1, 0.5)
    step(session, "a")
    assert [each.tokens for each in drafters[""].seen[0].step_times] == [*range(11, MAX_STEP_TIMES + 11)]


def test_a_drafter_that_is_not_worthwhile_is_not_asked(session, drafters):
    session.start("a", LOOP)
    step(session, "a")
    drafters[""].pause_steps = 3
    step(session, "a")
    for _ in range(3):
        assert step(session, "a") == [[]]
    assert len(drafters[""].seen) == 2
    step(session, "a")
    assert len(drafters[""].seen) == 3


def test_each_namespace_is_paused_for_itself_and_told_of_the_others(session, drafters):
    session.start("a", LOOP)
    session.start("b", LOOP, RequestOptions(salt="other"))
    step(session, "a", "b")
    mine, other = drafters.values()
    assert mine.seen[0].other_sequences == other.seen[0].other_sequences == 1
    mine.pause_steps = 2
    for _ in range(3):
        step(session, "a", "b")
    assert (len(mine.seen), len(other.seen)) == (2, 4)


def test_prompts_of_the_next_step_are_told(session, drafters):
    session.start("a", LOOP)
    session.draft([("a", LOOP)], prompt_tokens=70)
    assert drafters[""].seen[0].other_tokens == 70


def test_a_step_lasts_from_one_request_for_drafts_to_the_next(session, drafters, clock):
    steps = StepClock(session)
    session.start("a", LOOP)
    steps.end()
    step(session, "a")
    steps.begin(5)
    clock.now += 2
    steps.end()
    steps.begin(3)
    clock.now += 50
    steps.begin(4)  # The step of three tokens was abandoned.
    clock.now += 1
    steps.end()
    steps.end()
    step(session, "a")
    assert [each[:3] for each in drafters[""].seen[-1].step_times] == [(5, 1, 2.0), (4, 1, 1.0)]
