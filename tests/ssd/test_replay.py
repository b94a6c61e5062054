"""Replays verify and count like slow ones, and start requests when the recording allows it."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.base import CorpusDrafter
from ssd.baselines.classic import ClassicDrafter
from ssd.baselines.ngram import NgramDrafter
from ssd.baselines.none import NoDrafter
from ssd.budget.cost_profile import CostProfile
from ssd.budget.padding import Padding
from ssd.config import DrafterConfig
from ssd.corpus.corpus import Corpus
from ssd.corpus.rollout import Rollout
from ssd.drafter import SuffixDrafter
from ssd.replay import Step, replay
from ssd.replay.replaying import Arrivals
from ssd.types import DraftBatch, Path, Source, StepTime, offsets_of
from tests.replay import branches, recording_of, replayed

tokens = st.integers(0, 3)


@st.composite
def drafts(draw):
    """Return tokens and parents of a draft over few tokens, so that paths agree often."""
    size = draw(st.integers(0, 8))
    return [draw(tokens) for _ in range(size)], [draw(st.integers(-1, node - 1)) for node in range(size)]


@given(st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=8), drafts()), min_size=1, max_size=4))
def test_tokens_on_paths_of_the_output_are_accepted(rows):
    recording, counts = recording_of([([9], output) for output, _ in rows]), np.zeros((4, len(rows)), np.int64)
    step = Step(recording, counts, max_draft=8)
    for request in range(len(rows)):
        step.add(request)
    drafted = np.array([token for _, (own, _) in rows for token in own], np.uint32)
    parents = np.array([parent for _, (_, own) in rows for parent in own], np.int32)
    offsets = offsets_of(np.array([len(own) for _, (own, _) in rows], np.uint32))
    step.verify(DraftBatch(drafted, parents, np.ones(len(drafted), np.float32), np.zeros(len(drafted), "u1"), offsets))
    for row, (output, draft) in enumerate(rows):
        paths = branches(*draft)
        expected = [len(path) if path == output[: len(path)] else 0 for path in paths]
        accepted = max(expected, default=0)
        committed = output[: accepted + 1]
        assert step.depths[offsets[row] : offsets[row + 1]].tolist() == expected
        assert step.last(row).tolist() == committed
        assert step.ended[row] == (len(committed) == len(output))
        assert counts[:, row].tolist() == [1, len(paths), accepted, len(committed)]
        if accepted:
            assert expected[step.last_accepted[row]] == accepted


def replay_slowly(drafter, recording, limit):
    """Replay one request after the other; return steps, draft tokens and accepted tokens of each."""
    has_corpus, counts = isinstance(drafter, CorpusDrafter), []
    for number, request in enumerate(recording.requests):
        options = {"session_id": request.session, "refreshes": True} if has_corpus else {}
        steps = replayed(drafter, number, request.prompt, request.output, limit, **options)
        counts.append(sum(np.array([1, len(batch.tokens), accepted]) for batch, _, accepted in steps).tolist())
    return counts


def counts_of(counts):
    return np.column_stack((counts.steps, counts.drafted, counts.accepted)).tolist()


@given(
    st.lists(
        st.tuples(st.lists(tokens, max_size=4), st.lists(tokens, min_size=1, max_size=30), st.integers(-1, 2)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
)
def test_a_replay_counts_like_a_slow_one(requests, concurrency):
    recording = recording_of([request[:2] for request in requests], sessions=[session for *_, session in requests])
    counts = replay(recording, NgramDrafter(), concurrency=concurrency, max_draft=4)
    assert counts_of(counts) == replay_slowly(NgramDrafter(), recording, 4)
    assert counts.tokens.tolist() == recording.output_lengths.tolist()
    steps, drafted = counts.steps.sum(), counts.drafted.sum()
    assert (counts.tokens_per_step, counts.drafted_per_step) == (counts.tokens.sum() / steps, drafted / steps)
    assert counts.speedup_at(0.1) == pytest.approx(counts.tokens.sum() / (steps + 0.1 * drafted))
    assert sorted(counts.order.tolist()) == list(range(len(requests)))


SESSIONS = [0, 0, 0, 1, 2, 1, 2, 1, 0, 2, 1, 0]


def phrases():
    """Return a recording made of few phrases, so that each drafter finds matches."""
    rng = np.random.default_rng(0)
    phrases = rng.integers(0, 100, (6, 8))
    texts = [phrases[rng.integers(0, 6, 12)].ravel().tolist() for _ in SESSIONS]
    return recording_of([(text[:30], text[30:]) for text in texts], sessions=SESSIONS)


@pytest.mark.parametrize("shape", ["path", "tree", "classic"])
def test_text_is_indexed_before_each_draft(shape):
    def drafter():
        config = DrafterConfig(capacity=5000, draft_shape="path" if shape == "classic" else shape, cost=0.05)
        kind = ClassicDrafter if shape == "classic" else SuffixDrafter
        return kind(config, corpus=Corpus.from_config(config))

    counts = replay(phrases(), drafter(), max_draft=8)
    assert counts_of(counts) == replay_slowly(drafter(), phrases(), 8)
    assert counts.accepted.sum() > counts.steps.sum()
    twice = [replay(phrases(), drafter(), max_draft=8, concurrency=4) for _ in range(2)]
    assert counts_of(twice[0]) == counts_of(twice[1])


class WrongDrafter(NoDrafter):
    """Drafts a token that the target never produces."""

    def draft(self, progress):
        path = Path(np.array([99], np.uint32), np.ones(1, np.float32), Source.CORPUS)
        return DraftBatch.from_paths([path] * len(progress.sequence_ids))


@pytest.mark.parametrize(("lengths", "expected"), [((), 3 * 2), ((0, 4), 3 * 5)])
def test_the_time_of_a_step_is_that_of_its_tokens_with_padding(lengths, expected):
    a_second_per_token = CostProfile("some", "some", {1: {1: 1e3}, 10: {1: 1e4}})
    curve = a_second_per_token.curve(Padding(lengths=lengths))
    counts = replay(recording_of([([], [1] * 3)]), WrongDrafter(), curve=curve, max_draft=4)
    assert (int(counts.steps.sum()), counts.seconds) == (3, pytest.approx(expected))


@pytest.mark.parametrize(("make", "refreshes"), [(WrongDrafter, 0), (lambda: ClassicDrafter(corpus=Corpus(5000)), 6)])
def test_calls_are_measured_by_the_given_clock(make, refreshes):
    ticks, seconds = itertools.count(), []
    counts = replay(
        recording_of([([], [1, 2, 3])] * 2),
        make(),
        clock=ticks.__next__,
        max_draft=0,
        observe=lambda step: seconds.append(step.draft_s),
    )
    assert seconds == [1] * 6
    assert counts.draft_s == 6
    assert counts.other_s == refreshes + 2 + 2, "refreshing, starting and finishing"


def arrivals_of(recording):
    return Arrivals(recording, recording.in_order(), concurrency=9)


def test_a_session_of_many_turns_takes_no_more_time_for_each():
    arrivals = arrivals_of(recording_of([([], [1])] * 1000, sessions=[7] * 1000))
    for turn in range(1000):
        assert [*arrivals.beginning(0)] == [turn]
        arrivals.end(turn)
        assert len(arrivals._ready) <= 1


def test_requests_are_replayed_in_the_order_of_their_times():
    arrivals = arrivals_of(recording_of([([], [1])] * 3, began_s=[30, 10, 20]))
    assert [*arrivals.beginning(0)] == [1, 2, 0]


class Recorder(NgramDrafter):
    """Records the requests of each step, what the drafter is told, and the requests that began."""

    def __init__(self):
        super().__init__()
        self.steps, self.told, self.times = [], {}, []

    def start(self, sequence_id, prompt, *, session_id=None, rollout=None):
        self.told[sequence_id] = session_id, rollout
        super().start(sequence_id, prompt)

    def draft(self, progress):
        self.steps.append(tuple(progress.sequence_ids.tolist()))
        self.times.append(progress.step_times)
        return super().draft(progress)


def recorded(**options):
    """Return the recorder of a replay of requests with different tokens, all equally long."""
    recorder = Recorder()
    replay(recording_of([([], list(range(9)))] * 12, sessions=SESSIONS), recorder, max_draft=2, **options)
    return recorder


def test_a_turn_waits_for_the_previous_one_and_other_sessions_overtake_it():
    rounds = list(dict.fromkeys(recorded(concurrency=4).steps))
    assert rounds == [(0, 3, 4), (1, 5, 6), (2, 7, 9), (8, 10), (11,)]


@pytest.mark.parametrize(("concurrency", "expected"), [(1, list(range(12))), (2, [0, 3, 1, 4, 2, 5])])
def test_requests_start_in_order_of_arrival_within_the_limit(concurrency, expected):
    recorder = recorded(concurrency=concurrency)
    assert max(map(len, recorder.steps)) == concurrency
    assert [*recorder.told][: len(expected)] == expected


def test_batches_are_replayed_one_after_another():
    recorder = recorded(concurrency=12, batches=[np.array([3, 1]), np.array([4])])
    assert list(dict.fromkeys(recorder.steps)) == [(3, 1), (4,)]


def test_the_drafter_is_told_the_session_and_what_is_given():
    rollouts = {0: Rollout("a", 3)}
    told = recorded(options=lambda request: {"rollout": rollouts.get(request)}).told
    assert [told[request] for request in (0, 1, 4)] == [("0", rollouts[0]), ("0", None), ("2", None)]
    assert {*recorded(options=lambda _: {"session_id": None}).told.values()} == {(None, None)}
    recorder = Recorder()
    replay(recording_of([([], [1])]), recorder)
    assert recorder.told == {0: (None, None)}


def test_durations_of_a_step_are_told_with_the_next_one():
    recorder, number = Recorder(), itertools.count(1)

    def observe(step):
        step.step_times = (StepTime(1, 1, next(number)),)

    replay(recording_of([([], [1, 2, 3])]), recorder, observe=observe)
    assert [[time.seconds for time in times] for times in recorder.times] == [[], [1], [2]]


def test_the_concurrency_is_that_of_the_recording():
    recording = recording_of([([], [1] * 9)] * 4, began_s=[0, 1, 2, 10], ended_s=[5, 3, 4, 11])
    assert recording.concurrency().tolist() == [1, 2, 3, 1]
    recorder = Recorder()
    replay(recording, recorder, concurrency=recording.concurrency(), max_draft=2)
    assert len(recorder.steps[0]) == 3
    assert recorder.steps[-1] == (3,)
