"""Replays verify and count like slow ones, and start requests when the log allows it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.commands.advise.replay import Arrivals, TimedDrafter, replay, steps_of
from drafter_service.commands.advise.running import Running, _accept
from ssd.baselines.ngram import NgramDrafter
from ssd.baselines.none import NoDrafter
from ssd.budget.cost_profile import CostProfile
from ssd.budget.curve import StepCurve
from ssd.budget.padding import Padding
from ssd.types import DraftBatch, Path, Progress, Source, offsets_of
from tests.drafter_service.commands.advise.logs import traffic_of
from tests.replay import accepted_path, branches

CURVE = StepCurve.from_table((1, 4), (1, 10), np.array([[1.0, 4.0], [2.0, 8.0]]))

tokens = st.integers(0, 3)


@st.composite
def drafts(draw):
    """Return tokens and parents of a draft over few tokens, so that paths agree often."""
    size = draw(st.integers(0, 8))
    return [draw(tokens) for _ in range(size)], [draw(st.integers(-1, node - 1)) for node in range(size)]


@given(st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=8), drafts()), min_size=1, max_size=4))
def test_tokens_on_paths_of_the_output_are_accepted(rows):
    text = np.array([token for output, _ in rows for token in output], np.uint32)
    ends = np.cumsum([len(output) for output, _ in rows])
    starts = ends - [len(output) for output, _ in rows]
    drafted = np.array([token for _, (own, _) in rows for token in own], np.uint32)
    parents = np.array([parent for _, (_, own) in rows for parent in own], np.int32)
    offsets = offsets_of(np.array([len(own) for _, (own, _) in rows], np.uint32))
    depths, accepted, last = np.zeros(len(drafted), np.int64), np.zeros(len(rows), np.int64), np.zeros(len(rows), int)
    _accept(text, starts, ends, drafted, parents, offsets, depths, accepted, last)
    for row, (output, draft) in enumerate(rows):
        paths = branches(*draft)
        expected = [len(path) if path == output[: len(path)] else 0 for path in paths]
        assert depths[offsets[row] : offsets[row + 1]].tolist() == expected
        assert accepted[row] == max(expected, default=0)
        if accepted[row]:
            assert expected[last[row]] == accepted[row]


def replay_slowly(prompt, output, max_draft):
    """Return the numbers of steps and draft tokens of a request that drafts from its own text."""
    drafter, steps, drafted, done, last, verified = NgramDrafter(), 0, 0, 0, [], 0
    drafter.start(0, np.array(prompt, np.uint32))
    while done < len(output):
        progress = Progress.of_one(0, np.array(last, np.uint32), verified=verified, max_draft=max_draft)
        batch = drafter.draft(progress)
        last = output[done : done + len(accepted_path(batch, 0, output[done:])) + 1]
        verified = len(batch.tokens)
        steps, drafted, done = steps + 1, drafted + verified, done + len(last)
    return steps, drafted


@given(
    st.lists(
        st.tuples(st.lists(tokens, max_size=4), st.lists(tokens, min_size=1, max_size=30), st.integers(-1, 2)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
)
def test_a_replay_counts_like_a_slow_one(requests, concurrency):
    traffic = traffic_of([request[:2] for request in requests], sessions=[session for *_, session in requests])
    result = replay(traffic, TimedDrafter(NgramDrafter()), CURVE, concurrency=concurrency, max_draft=4)
    slow = [replay_slowly(prompt, output, 4) for prompt, output, _ in requests]
    assert list(zip(result.steps.tolist(), result.drafted.tolist(), strict=True)) == slow
    assert sorted(result.order.tolist()) == list(range(len(requests)))


class WrongDrafter(NoDrafter):
    """Drafts a token that the target never produces."""

    def draft(self, progress):
        path = Path(np.array([99], np.uint32), np.ones(1, np.float32), Source.CORPUS)
        return DraftBatch.from_paths([path] * len(progress.sequence_ids))


@pytest.mark.parametrize(("lengths", "expected"), [((), 3 * 2), ((0, 4), 3 * 5)])
def test_the_time_of_a_step_is_that_of_its_tokens_with_padding(lengths, expected):
    a_second_per_token = CostProfile("some", "some", {1: {1: 1e3}, 10: {1: 1e4}})
    curve = StepCurve.from_profile(a_second_per_token, Padding(lengths=lengths))
    result = replay(traffic_of([([], [1] * 3)]), TimedDrafter(WrongDrafter()), curve, concurrency=1, max_draft=4)
    assert (int(result.steps.sum()), result.seconds) == (3, pytest.approx(expected))


def arrivals_of(traffic):
    return Arrivals(traffic, traffic.in_order(), concurrency=9)


def test_turns_of_a_session_wait_for_each_other():
    arrivals = arrivals_of(traffic_of([([], [1])] * 5, sessions=[7, 7, -1, 7, -1]))
    assert [*arrivals.beginning(0)] == [0, 2, 4]
    arrivals.end(0)
    assert [*arrivals.beginning(2)] == [1]
    arrivals.end(1)
    assert [*arrivals.beginning(2)] == [3]


def test_a_session_of_many_turns_takes_no_more_time_for_each():
    arrivals = arrivals_of(traffic_of([([], [1])] * 1000, sessions=[7] * 1000))
    for turn in range(1000):
        assert [*arrivals.beginning(0)] == [turn]
        arrivals.end(turn)
        assert len(arrivals._ready) <= 1


def test_requests_are_replayed_in_the_order_of_their_times():
    arrivals = arrivals_of(traffic_of([([], [1])] * 3, began=[30, 10, 20]))
    assert [*arrivals.beginning(0)] == [1, 2, 0]


def test_accepted_drafts_from_other_requests_are_shared():
    output = [1, 2, 3]
    running = Running(traffic_of([([9], output)] * 4))
    for request in range(4):
        running.add(request)
    drafts = DraftBatch.from_paths(
        [
            Path(np.array([token], np.uint32), np.ones(1, np.float32), source)
            for token, source in [(1, Source.CORPUS), (1, Source.LOCAL), (7, Source.CORPUS), (1, Source.FALLBACK)]
        ]
    )
    running.verify(drafts)
    assert list(running.accepted_paths()) == [(0, 2, 1, True), (1, 6, 1, False), (3, 14, 1, True)]


class Recorder(TimedDrafter):
    """Records the requests of each step, and the largest number that had begun and not ended."""

    def __init__(self):
        super().__init__(NgramDrafter())
        self.steps, self.started = [], []

    def start(self, sequence_id, prompt, session):
        self.started.append(sequence_id)
        super().start(sequence_id, prompt, session)

    def draft(self, progress):
        self.steps.append(tuple(progress.sequence_ids.tolist()))
        return super().draft(progress)


SESSIONS = [0, 0, 0, 1, 2, 1, 2, 1, 0, 2, 1, 0]


def recorded(concurrency, **options):
    """Return the recorder of a replay of requests with different tokens, all equally long."""
    recorder = Recorder()
    traffic = traffic_of([([], list(range(9)))] * 12, sessions=SESSIONS, **options)
    replay(traffic, recorder, CURVE, concurrency=concurrency, max_draft=2)
    return recorder


def test_a_turn_waits_for_the_previous_one_and_other_sessions_overtake_it():
    rounds = list(dict.fromkeys(recorded(4).steps))
    assert rounds == [(0, 3, 4), (1, 5, 6), (2, 7, 9), (8, 10), (11,)]


@pytest.mark.parametrize(("concurrency", "expected"), [(1, list(range(12))), (2, [0, 3, 1, 4, 2, 5])])
def test_requests_start_in_order_of_arrival_within_the_limit(concurrency, expected):
    recorder = recorded(concurrency)
    assert max(map(len, recorder.steps)) == concurrency
    assert recorder.started[: len(expected)] == expected


def test_some_requests_are_replayed():
    traffic, recorder = traffic_of([([], [1])] * 4), Recorder()
    list(steps_of(traffic, np.array([3, 1]), recorder, concurrency=1, max_draft=2))
    assert recorder.started == [3, 1]


def test_the_concurrency_is_that_of_the_log():
    traffic = traffic_of([([], [1] * 9)] * 4, began=[0, 1, 2, 10], ended=[5, 3, 4, 11])
    assert traffic.concurrency().tolist() == [1, 2, 3, 1]
    recorder = Recorder()
    replay(traffic, recorder, CURVE, concurrency=traffic.concurrency(), max_draft=2)
    assert len(recorder.steps[0]) == 3
    assert recorder.steps[-1] == (3,)
