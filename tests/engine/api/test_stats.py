"""Compare totals of steps with token-by-token counting, and test phases of requests on a fake clock."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import stats
from engine.api.messages import RequestTimes
from engine.api.stats import EngineTotals, RequestTimer
from engine.drafters.sources import SOURCE_NAMES, DraftSource
from engine.scheduling.report import StepReport
from engine.scheduling.request import Completion, FinishReason, Request
from engine.scheduling.table import ADMISSION, COLUMNS, SEQUENCE_ID
from tests.engine.api.fake_engine import FakeDrafter, FakeEngine, results_of


@st.composite
def results(draw):
    # Drafters of other packages may use unknown sources.
    sources = np.array(draw(st.lists(st.sampled_from([*DraftSource, 77]), max_size=2)), np.uint8)
    kept = np.flatnonzero(draw(st.lists(st.booleans(), min_size=len(sources), max_size=len(sources))))
    tokens = np.zeros(len(kept) + draw(st.integers(0, 1)), np.uint32)
    return draw(st.integers(0, 3)), tokens, [*range(-1, len(sources) - 1)], sources, kept


def report_of(step, **settings):
    report = StepReport(**settings)
    report.arrays = results_of(step)
    return report


@settings(max_examples=60)
@given(st.lists(st.lists(results(), max_size=5, unique_by=lambda result: result[0]), max_size=6))
def test_totals_equal_counting_token_by_token(steps):
    totals = EngineTotals(FakeEngine())
    for _ in range(4):
        totals.request_started(Request(np.zeros(10, np.uint32)))
    drafted, accepted, sizes, drafts = Counter(), Counter(), [], []
    for step in steps:
        totals.step_finished(report_of(step, is_backing_off=len(step) % 2 == 1))
        for _, tokens, _, sources, kept in step:
            sizes.append(len(tokens))
            drafts.append((len(sources), len(kept)))
            drafted.update(sources.tolist())
            accepted.update(sources[node] for node in kept)
    snapshot = totals.snapshot()
    for shown, counted in ((snapshot.drafted_by_source, drafted), (snapshot.accepted_by_source, accepted)):
        by_code = [counted[source] + counted[77] * (source is DraftSource.OTHER) for source in DraftSource]
        assert shown == dict(zip(SOURCE_NAMES, by_code, strict=True))
    assert (snapshot.drafted, snapshot.accepted) == (drafted.total(), accepted.total())
    assert (snapshot.steps, snapshot.backoff_steps) == (len(steps), sum(len(step) % 2 for step in steps))
    assert (snapshot.sequence_steps, snapshot.generated_tokens) == (len(sizes), sum(sizes))
    assert snapshot.drafts == sum(length > 0 for length, _ in drafts)
    for kind, shown in enumerate((snapshot.drafted_per_position, snapshot.accepted_per_position)):
        assert shown == tuple(sum(draft[kind] > place for draft in drafts) for place in range(2))
    assert snapshot.prompt_tokens == 40


def test_learned_tokens_exclude_private_and_cancelled_requests():
    engine = FakeEngine()
    engine.drafter = FakeDrafter()
    totals = EngineTotals(engine)
    ended = Completion(np.zeros(5, np.uint32), FinishReason.STOP, 1, 0, 0, cached_tokens=2)
    cancelled = Completion(np.zeros(5, np.uint32), FinishReason.ABORT, 1, 0, 0, cached_tokens=2)
    prompt = np.zeros(3, np.uint32)
    for learn, completion in ((True, ended), (False, ended), (True, cancelled)):
        totals.request_started(Request(prompt, learn=learn))
        totals.request_ended(Request(prompt, learn=learn), completion)
    snapshot = totals.snapshot()
    assert (snapshot.learned_tokens, snapshot.cached_tokens, snapshot.corpus) == (5, 6, None)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0, admissions={}, last=0)
    monkeypatch.setattr(stats, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def step(clock, timer, began, ended, running=(), produced=()):
    clock.now = ended
    state = np.zeros((4, COLUMNS), np.int64)
    for number in set(running) - set(clock.admissions):
        clock.last += 1
        clock.admissions[number] = clock.last
    clock.admissions = {number: clock.admissions[number] for number in running}
    for row, number in enumerate(running):
        state[row, [SEQUENCE_ID, ADMISSION]] = number, clock.admissions[number]
    timer.step_finished(began, state, report_of([(number, [0], [], [], []) for number in produced]))


def test_phases_of_requests(clock):
    timer = RequestTimer()
    clock.now = 1.0
    timer.request_started(5)
    clock.now = 2.0
    timer.request_started(6)
    step(clock, timer, 3, 4, running=[5])  # a chunk of its prompt
    step(clock, timer, 6, 10, running=[5], produced=[5])
    step(clock, timer, 20, 21, running=[])  # preempted
    step(clock, timer, 30, 40, running=[6], produced=[5, 6])  # 5 ended and no longer runs
    assert timer.request_ended(5) == RequestTimes(queue=2, prefill=7, decode=30)
    step(clock, timer, 40, 44, produced=[6])
    assert timer.request_ended(6) == RequestTimes(queue=28, prefill=10, decode=4)


def test_ids_can_be_reused_after_one_step_or_a_cancellation(clock):
    timer = RequestTimer()
    for start in (0.0, 100.0):
        clock.now = start
        timer.request_started(1)
        step(clock, timer, start + 1, start + 3, produced=[1])
        assert timer.request_ended(1) == RequestTimes(queue=1, prefill=2, decode=0)
    for running in ([], [1]):  # cancelled while waiting, and while running
        clock.now = 200.0
        timer.request_started(1)
        step(clock, timer, 201, 202, running=running)
        assert timer.request_ended(1) is None
    clock.now = 300.0
    timer.request_started(1)
    step(clock, timer, 310, 320, produced=[1])
    assert timer.request_ended(1) == RequestTimes(queue=10, prefill=10, decode=0)
