"""`Worker` with a counting engine."""

import gc
import multiprocessing
import signal
import threading

import numpy as np
import pytest

from engine.api import worker
from engine.api.messages import (
    CancelRequest,
    CorpusSize,
    EngineFailed,
    EngineReady,
    EngineStats,
    RequestEnded,
    RequestRefused,
    Shutdown,
    StepFinished,
    SubmitRequest,
    UpdateWeights,
    WeightsUpdated,
)
from engine.api.worker import Worker, run_worker
from engine.config import ContextWindow
from engine.scheduling.request import Request, SamplingParams
from ssd.errors import UserError
from tests.engine.api.fake_engine import FakeDrafter, FakeEngine

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
