"""The engine's side of the pipe, with an engine that counts."""

import multiprocessing
import signal
import threading

import numpy as np
import pytest

from engine.api.messages import Begin, Cancel, Ended, Failed, Figures, Produced, Ready, Refused, Stop
from engine.api.worker import Worker, run_worker
from engine.request import Request, SamplingParams
from ssd.errors import UserError
from tests.engine.api.fake_engine import FakeEngine

PATIENCE_S = 30


def request(tokens=4, prompt=(1, 2, 3)):
    return Request(np.array(prompt, np.uint32), SamplingParams(max_tokens=tokens))


@pytest.fixture
def pipe():
    ours, theirs = multiprocessing.Pipe()
    yield ours, theirs
    ours.close()


def worked(pipe, engine, commands):
    """All events of a worker that gets these commands, and then is stopped."""
    ours, theirs = pipe
    for command in (*commands, Stop()):
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
    ours.send(Begin(7, request(5)))
    events = []
    while not (any(isinstance(event, Ended) for event in events) and isinstance(events[-1], Figures)):
        assert ours.poll(PATIENCE_S)  # what it has done is said before it rests
        events += ours.recv()
    ours.send(Stop())
    running.join(PATIENCE_S)
    assert not running.is_alive()
    assert events[0] == Ready(1000, 100)
    produced = [event for event in events if isinstance(event, Produced)]
    assert {event.request_id for event in produced} == {7}
    assert np.concatenate([event.tokens for event in produced]).tolist() == [1, 2, 3, 4, 5]
    figures = events[-1]
    assert (figures.generated_tokens, figures.prompt_tokens, figures.running) == (5, 3, 0)
    assert (figures.pages_used, figures.accepted, figures.accepted_at) == (0, 3, (3, 0))


def test_a_request_that_cannot_run_is_refused_and_others_go_on(pipe):
    engine = FakeEngine()
    events = worked(pipe, engine, [Begin(1, request(prompt=())), Begin(2, request())])
    assert [event.request_id for event in events if isinstance(event, Refused)] == [1]
    assert len(engine.requests) == 1


def test_cancelling_gives_back_what_a_request_held(pipe):
    engine = FakeEngine()
    worked(pipe, engine, [Begin(1, request(50)), Begin(2, request(50)), Cancel(1), Cancel(9)])
    assert [held.sampling.max_tokens for held, _ in engine.cancelled] == [50]
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("problem", "said"), [(UserError("no such model"), "no such model"), (RuntimeError("odd"), "RuntimeError: odd")]
)
def test_what_keeps_an_engine_from_starting_is_said(pipe, problem, said, capfd):
    def build():
        raise problem

    ours, theirs = pipe
    before = signal.getsignal(signal.SIGINT)
    try:
        if isinstance(problem, UserError):
            run_worker(theirs, build)
        else:
            with pytest.raises(SystemExit):
                run_worker(theirs, build)
    finally:
        signal.signal(signal.SIGINT, before)
    [event] = ours.recv()
    assert isinstance(event, Failed)
    assert said in event.reason
