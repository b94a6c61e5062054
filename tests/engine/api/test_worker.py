"""The engine's side of the pipe, with an engine that counts."""

import multiprocessing
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from engine.api import worker
from engine.api.messages import Begin, Cancel, CorpusFigures, Ended, Failed, Figures, Produced, Ready, Refused, Stop
from engine.api.worker import Worker, run_worker
from engine.scheduling.request import Request, SamplingParams
from ssd.errors import UserError
from tests.engine.api.fake_engine import PAGE_SIZE, PAGES, FakeEngine

PATIENCE_S = 30


def request(tokens=4, prompt=(1, 2, 3)):
    return Request(np.array(prompt, np.uint32), SamplingParams(max_tokens=tokens))


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
    assert events[0] == Ready(1000, 100, 16, 64)
    produced = [event for event in events if isinstance(event, Produced)]
    assert {event.request_id for event in produced} == {7}
    assert np.concatenate([event.tokens for event in produced]).tolist() == [1, 2, 3, 4, 5]
    figures = events[-1]
    assert (figures.generated_tokens, figures.prompt_tokens, figures.running) == (5, 3, 0)
    assert (figures.pages_used, figures.accepted, figures.accepted_at) == (0, 3, (3, 0))
    assert figures.drafted_from == {"corpus": 3, "local": 3}
    assert figures.accepted_from == {"corpus": 3, "local": 0}
    assert (figures.learned_tokens, figures.corpus) == (5, CorpusFigures(7, 9))
    # The first of three steps completed the prompt of three tokens, too.
    assert (figures.step_tokens[:3], figures.step_tokens_sum) == ((1, 2, 0), 5 + 3)
    [ended] = [event for event in events if isinstance(event, Ended)]
    assert min(ended.times.queue, ended.times.prefill, ended.times.decode) >= 0


def test_what_fits_into_the_cache_bounds_what_may_be_asked_for(pipe):
    engine = FakeEngine()
    engine.model = SimpleNamespace(vocab_size=1000, max_positions=5000)
    assert worked(pipe, engine, [])[0].longest == PAGES * PAGE_SIZE


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


def test_what_the_corpus_took_late_is_said_while_the_engine_rests(pipe, monkeypatch):
    ours, theirs = pipe
    monkeypatch.setattr(worker, "INDEXED_AFTER_S", 0)
    engine = FakeEngine()
    tokens = iter([7, 8])
    engine.drafter = SimpleNamespace(corpus=Growing(tokens))
    running = threading.Thread(target=Worker(engine, theirs).run, daemon=True)
    running.start()
    said = []
    for _ in range(3):
        assert ours.poll(PATIENCE_S)
        said += ours.recv()
    _, before, after = said
    ours.send(Stop())
    running.join(PATIENCE_S)
    assert not running.is_alive()
    assert (before.corpus.tokens, after.corpus.tokens) == (7, 8)


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
