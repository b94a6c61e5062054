"""`Worker` with an engine whose model is fake: events of requests, and totals of steps."""

import gc
import pickle
import signal
from collections import Counter, deque
from dataclasses import replace

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
    Shutdown,
    StepFinished,
    SubmitRequest,
    UpdateWeights,
    WeightsUpdated,
)
from engine.api.worker import Worker, run_worker
from engine.drafters.sources import SOURCE_NAMES, DraftSource
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from ssd.errors import UserError
from tests.engine.fake_runner import EOS, VOCAB, fake_engine
from tests.engine.steps import each_of
from tests.engine.trees import RandomTrees

STEP = object()
"""Among commands: the following ones arrive a step later."""


class Pipe:
    """The worker's end of its pipe: commands arrive between steps, and `Shutdown` once the engine is idle."""

    def __init__(self, *commands):
        self._commands, self.events = deque(commands), []

    def poll(self, timeout=0):
        if self._commands and self._commands[0] is STEP:
            self._commands.popleft()
            return False
        return bool(self._commands)

    def recv(self):
        while self._commands and self._commands[0] is STEP:
            self._commands.popleft()
        return self._commands.popleft() if self._commands else Shutdown()

    def send(self, events):
        self.events += events

    def send_bytes(self, data):
        self.send(pickle.loads(data))

    def sent(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


def request(tokens=4, prompt=(1, 2, 3), **more):
    """Return a request for an output of so many tokens; without any, its prompt is scored."""
    sampling = SamplingParams(tokens, ignore_eos=True, prompt_logprobs=None if tokens else 0)
    return Request(np.array(prompt, np.uint32), sampling, **more)


def run(engine, *commands):
    """Let a worker run commands, and return its pipe."""
    pipe = Pipe(*commands)
    Worker(engine, pipe).run()
    return pipe


def parts_of(pipe):
    """Return the parts of all steps by request id."""
    parts = {}
    for event in pipe.sent(StepFinished):
        for request_id, part in event.parts():
            parts.setdefault(request_id, []).append(part)
    return parts


def tokens_of(parts):
    return [token for part in parts for token in part.tokens.tolist()]


class OddSources(RandomTrees):
    """Names several sources of its draft tokens, one of them, as a third-party drafter may, with an unknown code."""

    def draft(self, progress):
        batch = super().draft(progress)
        return replace(batch, source=np.resize(np.array([0, 77, 6], np.uint8), len(batch.tokens)))


class Watched:
    """An engine, and a record of what it did."""

    def __init__(self, monkeypatch, engine):
        self.engine = engine
        self.reports, self.cached_tokens = [], 0
        for name in ("step", "cancel"):
            monkeypatch.setattr(engine, name, getattr(self, f"_{name}"))

    def _step(self):
        self.reports.append(type(self.engine).step(self.engine))
        return self.reports[-1]

    def _cancel(self, sequence_id):
        completion = type(self.engine).cancel(self.engine, sequence_id)
        self.cached_tokens += completion.cached_tokens
        return completion


REQUESTS = st.builds(
    request,
    st.integers(0, 30),
    st.lists(st.sampled_from([1, 2]), min_size=1, max_size=40),  # Some begin alike.
    learn=st.booleans(),
)
ARRIVALS = st.lists(st.tuples(REQUESTS, st.integers(0, 3), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=40)
@given(ARRIVALS, st.sampled_from([20, 200]))
def test_events_and_totals_equal_those_of_running_the_requests_without_drafts(arrivals, pages):
    """Requests arrive between steps, some are cancelled, and few pages let others be computed again."""
    commands, requests = [], {}
    for number, (each, steps, is_cancelled) in enumerate(arrivals):
        # These ids descend while those of the engine ascend.
        requests[100 - number] = each
        commands += [SubmitRequest(100 - number, each), *[STEP] * steps]
        commands += [CancelRequest(100 - number)] if is_cancelled else []
    completions = fake_engine(NoDrafter(), None).generate(requests.values())
    expected = {number: each.tokens.tolist() for number, each in zip(requests, completions, strict=True)}
    drafter = OddSources(requests.values(), expected.values(), VOCAB)
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch, fake_engine(drafter, None, draft_shape="tree", pages=pages))
        pipe = run(watched.engine, *commands)
    assert pipe.events[0] == EngineReady(VOCAB, watched.engine.window, (EOS,))
    parts, ended = parts_of(pipe), {event.request_id: event for event in pipe.sent(RequestEnded)}
    for number, tokens in expected.items():
        own = parts.get(number, [])
        assert tokens_of(own) == tokens[: len(tokens_of(own))]
        assert all(part.visible == len(part.tokens) >= part.accepted for part in own)
        if number in ended:
            assert ended[number].completion.tokens.tolist() == tokens_of(own) == tokens
        else:
            assert CancelRequest(number) in commands
    check_totals(pipe.sent(EngineStats)[-1], watched, requests, ended)


def check_totals(stats, watched, requests, ended):
    """Compare totals with what the reports of steps contain, counted token by token."""
    results = [result for report in watched.reports for result in each_of(report.result)]
    drafted, accepted = Counter(), Counter()
    for result in results:
        drafted.update(result.sources[: result.drafted].tolist())
        accepted.update(result.sources[result.kept].tolist())
    for shown, counted in ((stats.drafted_by_source, drafted), (stats.accepted_by_source, accepted)):
        codes = [counted[source] + counted[77] * (source is DraftSource.OTHER) for source in DraftSource]
        assert shown == dict(zip(SOURCE_NAMES, codes, strict=True))
    assert (stats.drafted, stats.accepted) == (drafted.total(), accepted.total())
    assert (stats.steps, stats.sequence_steps) == (len(watched.reports), len(results))
    assert stats.generated_tokens == sum(len(result.tokens) for result in results)
    assert stats.drafts == sum(result.drafted > 0 for result in results)
    places = range(watched.engine.max_draft)
    assert stats.drafted_per_position == tuple(
        sum(max(each.draft_depths, default=0) > place for each in results) for place in places
    )
    assert stats.accepted_per_position == tuple(sum(each.accepted > place for each in results) for place in places)
    assert stats.prompt_tokens == sum(len(each.prompt) for each in requests.values())
    completions = {number: event.completion for number, event in ended.items()}
    assert stats.learned_tokens == sum(len(completions[number].tokens) for number in ended if requests[number].learn)
    assert stats.cached_tokens == watched.cached_tokens + sum(each.cached_tokens for each in completions.values())
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)
    assert stats.preemptions == watched.engine.scheduler.preemptions


def test_a_token_that_ends_an_output_is_not_part_of_its_text():
    stopped = Request(np.array([1, 2], np.uint32), SamplingParams(20, stop_token_ids=tuple(range(1, VOCAB))))
    [part] = parts_of(run(fake_engine(NoDrafter(), None), SubmitRequest(7, stopped)))[7]
    assert (len(part.tokens), part.visible) == (1, 0)


def test_requests_that_take_long_to_add_are_added_between_steps(monkeypatch):
    """The clock makes each request take 0.2 s to add."""
    engine, steps = fake_engine(NoDrafter(), None), []
    step, add = engine.step, engine.add
    monkeypatch.setattr(engine, "step", lambda: steps.append("step") or step())
    monkeypatch.setattr(engine, "add", lambda added: steps.append("add") or add(added))
    monkeypatch.setattr(worker.time, "thread_time", lambda: 0.2 * steps.count("add"))
    run(engine, *(SubmitRequest(number, request(9)) for number in range(3)))
    assert steps[:5] == ["add", "step", "add", "step", "add"]


def test_commands_are_handled_and_tokens_sent_while_requests_finish_for_new_weights(monkeypatch):
    engine = fake_engine(NoDrafter(), None)

    def update_weights(path, *, version, observe):
        if path == "bad":
            raise UserError("weights that do not fit")
        while engine.has_work:
            observe(engine.step())
        engine.version = version

    monkeypatch.setattr(engine, "update_weights", update_weights)
    pipe = run(
        engine,
        SubmitRequest(1, request(100)),
        SubmitRequest(2, request(5)),
        UpdateWeights(3, "good", 8),
        CancelRequest(1),
        UpdateWeights(4, "bad", 9),
    )
    assert [event.request_id for event in pipe.sent(RequestEnded)] == [2]
    assert {number: len(tokens_of(parts)) for number, parts in parts_of(pipe).items()} == {1: 1, 2: 5}
    assert pipe.sent(WeightsUpdated) == [WeightsUpdated(3, 8)]
    assert pipe.sent(RequestRefused) == [RequestRefused(4, "weights that do not fit")]


def test_an_idle_worker_sends_the_size_of_the_corpus_again_after_indexing():
    drafter = NoDrafter()
    sizes = iter([7, 8])
    drafter.corpus = type("Growing", (), {"capacity": 9, "tokens": property(lambda _: next(sizes))})()
    before, after = run(fake_engine(drafter, None)).sent(EngineStats)
    assert (before.corpus, after.corpus) == (CorpusSize(7, 9), CorpusSize(8, 9))


@pytest.fixture
def usual_signals():
    """The worker ignores signals, and processes of later tests would inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize(
    ("problem", "reason"), [(UserError("no such model"), "no such model"), (RuntimeError("odd"), "RuntimeError: odd")]
)
def test_a_failed_start_is_reported(problem, reason):
    def build():
        raise problem

    pipe = Pipe()
    if isinstance(problem, UserError):
        run_worker(pipe, build)
    else:
        with pytest.raises(SystemExit):
            run_worker(pipe, build)
    [event] = pipe.sent(EngineFailed)
    assert reason in event.reason


@pytest.mark.usefixtures("usual_signals")
def test_what_exists_at_the_start_is_left_out_of_garbage_collections():
    frozen = gc.get_freeze_count()
    try:
        run_worker(Pipe(), lambda: fake_engine(NoDrafter(), None))
        assert gc.get_freeze_count() > frozen + 10_000
    finally:
        gc.unfreeze()
