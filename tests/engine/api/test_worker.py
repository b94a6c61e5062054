"""`Worker` with a counting engine: events, totals of steps, and phases of requests."""

import gc
import multiprocessing
import signal
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import worker
from engine.api.messages import (
    CancelRequest,
    CorpusSize,
    EngineFailed,
    EngineReady,
    EngineStats,
    RequestEnded,
    RequestRefused,
    RequestTimes,
    Shutdown,
    StepFinished,
    SubmitRequest,
    UpdateWeights,
    WeightsUpdated,
)
from engine.api.worker import EngineTotals, RequestTimer, Worker, run_worker
from engine.config import ContextWindow
from engine.drafters.sources import SOURCE_NAMES, DraftSource
from engine.scheduling.report import StepReport
from engine.scheduling.request import Completion, FinishReason, Request, SamplingParams
from engine.scheduling.table import ADMISSION, COLUMNS, SEQUENCE_ID
from ssd.errors import UserError
from tests.engine.api.fake_engine import FakeDrafter, FakeEngine, results_of

TIMEOUT_S = 30


def request(tokens=4, prompt=(1, 2, 3), **settings):
    return Request(np.array(prompt, np.uint32), SamplingParams(max_tokens=tokens, **settings))


def produced_by(events):
    """Return the parts of all steps by request id."""
    parts = {}
    for event in events:
        if isinstance(event, StepFinished):
            for request_id, part in event.parts():
                parts.setdefault(request_id, []).append(part)
    return parts


def tokens_of(parts):
    return np.concatenate([part.tokens for part in parts]).tolist()


class Growing:
    capacity = 9

    def __init__(self, tokens):
        self._tokens = tokens

    @property
    def tokens(self):
        return next(self._tokens)


@pytest.fixture
def pipe():
    ours, theirs = multiprocessing.Pipe()
    yield ours, theirs
    ours.close()


def run_commands(pipe, engine, commands):
    """Return all events of a worker that receives these commands and then `Shutdown`."""
    ours, theirs = pipe
    for command in (*commands, Shutdown()):
        ours.send(command)
    Worker(engine, theirs).run()
    theirs.close()
    events = []
    while True:
        try:
            events += ours.recv()
        except EOFError:
            return events


def test_requests_run_to_their_end(pipe):
    ours, theirs = pipe
    engine = FakeEngine()
    running = threading.Thread(target=Worker(engine, theirs).run)
    running.start()
    ours.send(SubmitRequest(7, request(5)))
    events = []
    while not (any(isinstance(event, RequestEnded) for event in events) and isinstance(events[-1], EngineStats)):
        assert ours.poll(TIMEOUT_S)  # an idle worker has sent all events
        events += ours.recv()
    ours.send(Shutdown())
    running.join(TIMEOUT_S)
    assert not running.is_alive()
    assert events[0] == EngineReady(1000, ContextWindow(100, 100), (0,))
    [(request_id, parts)] = produced_by(events).items()
    assert (request_id, tokens_of(parts)) == (7, [1, 2, 3, 4, 5])
    stats = events[-1]
    assert (stats.generated_tokens, stats.prompt_tokens, stats.running) == (5, 3, 0)
    assert (stats.kv_usage, stats.accepted, stats.accepted_per_position) == (0, 3, (3, 0))
    assert {name: count for name, count in stats.drafted_by_source.items() if count} == {"corpus": 3, "local": 3}
    assert {name: count for name, count in stats.accepted_by_source.items() if count} == {"corpus": 3}
    assert (stats.learned_tokens, stats.corpus) == (5, CorpusSize(7, 9))
    [ended] = [event for event in events if isinstance(event, RequestEnded)]
    assert min(ended.times.queue, ended.times.prefill, ended.times.decode) >= 0


def test_each_request_gets_its_own_tokens(pipe):
    """Ids descend while those of the engine ascend, requests end in different steps, and one is cancelled."""
    lengths = {9: 3, 8: 6, 7: 1, 6: 10, 5: 5}
    submitted = [
        SubmitRequest(number, request(length, (100 * number, 2), stop_token_ids=(0,) * (number % 2)))
        for number, length in lengths.items()
    ]
    cancelled = [SubmitRequest(10, request(90)), CancelRequest(10)]
    updating = UpdateWeights(3, "good", 8, "finish")  # runs all requests to their end
    events = run_commands(pipe, Updating(), [*submitted[:2], *cancelled, *submitted[2:], updating])
    parts = produced_by(events)
    assert {number: tokens_of(each) for number, each in parts.items()} == {
        number: list(range(100 * number, 100 * number + length)) for number, length in lengths.items()
    }
    for number, each in parts.items():
        assert all(part.accepted == 1 for part in each)
        # A token that ends the output is not part of the text.
        assert [part.visible - len(part.tokens) for part in each] == [0] * (len(each) - 1) + [-(number % 2)]
    ended = {event.request_id: event.completion.tokens[0] for event in events if isinstance(event, RequestEnded)}
    assert ended == {number: 100 * number for number in lengths}


def test_requests_that_take_long_to_add_are_added_between_steps(pipe, monkeypatch):
    """The clock makes each request take 0.2 s to add."""
    engine, add, steps = FakeEngine(), FakeEngine.add, []

    def slow_add(self, added):
        steps.append(self.steps)
        return add(self, added)

    monkeypatch.setattr(FakeEngine, "add", slow_add)
    monkeypatch.setattr(worker.time, "thread_time", lambda: 0.2 * len(steps))
    run_commands(pipe, engine, [SubmitRequest(number, request(100)) for number in range(3)])
    assert steps == [0, 1, 2]


class Updating(FakeEngine):
    """Finishes all requests before its weights change."""

    version = 0

    def update_weights(self, path, *, version, running, observe):
        assert running == "finish"
        if path == "bad":
            raise UserError("weights that do not fit")
        while self.requests:
            observe(self.step())
        self.version = version


def test_commands_are_handled_and_tokens_sent_while_requests_finish_for_new_weights(pipe):
    engine = Updating()
    events = run_commands(
        pipe,
        engine,
        [
            SubmitRequest(1, request(100_000)),
            SubmitRequest(2, request(5)),
            UpdateWeights(3, "good", 8, "finish"),
            CancelRequest(1),
            UpdateWeights(4, "bad", 9, "finish"),
        ],
    )
    assert [held.sampling.max_tokens for held, _ in engine.cancelled] == [100_000]
    assert [event.request_id for event in events if isinstance(event, RequestEnded)] == [2]
    assert tokens_of(produced_by(events)[2]) == [1, 2, 3, 4, 5]
    assert WeightsUpdated(3, 8) in events
    assert RequestRefused(4, "weights that do not fit") in events


def test_an_idle_worker_sends_the_corpus_size_again_after_indexing(pipe, monkeypatch):
    ours, theirs = pipe
    monkeypatch.setattr(worker, "INDEXING_DELAY_S", 0)
    engine = FakeEngine()
    tokens = iter([7, 8])
    engine.drafter = FakeDrafter(Growing(tokens))
    running = threading.Thread(target=Worker(engine, theirs).run, daemon=True)
    running.start()
    events = []
    for _ in range(3):
        assert ours.poll(TIMEOUT_S)
        events += ours.recv()
    _, before, after = events
    ours.send(Shutdown())
    running.join(TIMEOUT_S)
    assert not running.is_alive()
    assert (before.corpus.tokens, after.corpus.tokens) == (7, 8)


@pytest.mark.parametrize(
    ("problem", "reason"), [(UserError("no such model"), "no such model"), (RuntimeError("odd"), "RuntimeError: odd")]
)
def test_a_failed_start_is_reported(pipe, problem, reason, capfd):
    def build():
        raise problem

    ours, theirs = pipe
    # The worker ignores these signals, and processes of later tests would inherit that.
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if isinstance(problem, UserError):
            run_worker(theirs, build)
        else:
            with pytest.raises(SystemExit):
                run_worker(theirs, build)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    [event] = ours.recv()
    assert isinstance(event, EngineFailed)
    assert reason in event.reason


def test_what_exists_at_the_start_is_left_out_of_garbage_collections(pipe):
    ours, theirs = pipe
    ours.close()
    engine, frozen = FakeEngine(), gc.get_freeze_count()
    engine.close = lambda: None
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        run_worker(theirs, lambda: engine)  # It ends at once, since nobody listens.
        assert gc.get_freeze_count() > frozen + 10_000
    finally:
        gc.unfreeze()
        for number, handler in before.items():
            signal.signal(number, handler)


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
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: clock.now))
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
