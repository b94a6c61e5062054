"""Replays verify like the benchmark's, and start requests when the log allows it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.drafters import Draft, Embedded
from benchmarks.support.rounds import replay as slow_replay
from benchmarks.support.rounds import walk
from benchmarks.traces import Request, Trace
from drafter_service.commands.advise.replay import Arrivals, _accept, replay
from drafter_service.commands.advise.trials import TimedDrafter
from ssd.baselines.ngram import NgramDrafter
from ssd.types import offsets_of
from tests.drafter_service.commands.advise.logs import traffic_of

tokens = st.integers(0, 3)


@st.composite
def drafts(draw):
    """Return tokens and parents of a draft over few tokens, so that paths agree often."""
    size = draw(st.integers(0, 8))
    return [draw(tokens) for _ in range(size)], [draw(st.integers(-1, node - 1)) for node in range(size)]


@given(st.lists(st.tuples(st.lists(tokens, min_size=1, max_size=8), drafts()), min_size=1, max_size=4))
def test_accepted_tokens_equal_those_of_the_benchmark(rows):
    text = np.array([token for output, _ in rows for token in output], np.uint32)
    ends = np.cumsum([len(output) for output, _ in rows])
    starts = ends - [len(output) for output, _ in rows]
    drafted = np.array([token for _, (own, _) in rows for token in own], np.uint32)
    parents = np.array([parent for _, (_, own) in rows for parent in own], np.int32)
    offsets = offsets_of(np.array([len(own) for _, (own, _) in rows], np.uint32))
    accepted, last = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    _accept(text, starts, ends, drafted, parents, offsets, accepted, last)
    for row, (output, (own, own_parents)) in enumerate(rows):
        agrees, longest = walk(Draft(own, own_parents, None), output, 0)
        assert accepted[row] == longest
        if longest:
            depth, node = 0, last[row]
            while node >= 0:
                assert agrees[node]
                depth, node = depth + 1, own_parents[node]
            assert depth == longest


@given(
    st.lists(
        st.tuples(st.lists(tokens, max_size=4), st.lists(tokens, min_size=1, max_size=30), st.integers(0, 2)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
)
def test_a_replay_counts_like_the_benchmark(requests, concurrency):
    traffic = traffic_of([request[:2] for request in requests], sessions=[session for *_, session in requests])
    result = replay(traffic, TimedDrafter(NgramDrafter(), None, None), concurrency=concurrency, max_draft=4, cost=0.02)
    trace = Trace(
        "t",
        [
            Request(np.array([*prompt, *output], np.uint32), len(prompt), session)
            for prompt, output, session in requests
        ],
    )
    tally = slow_replay(Embedded(NgramDrafter(), 4), trace, concurrency)
    assert (result.steps.sum(), result.drafted.sum()) == (tally.steps, tally.drafted)
    assert sorted(result.order.tolist()) == list(range(len(requests)))


def test_turns_of_a_session_wait_for_each_other():
    arrivals = Arrivals(traffic_of([([], [1])] * 5, sessions=[7, 7, -1, 7, -1]))
    assert [arrivals.next() for _ in range(4)] == [0, 2, 4, None]
    arrivals.end(0)
    assert [arrivals.next(), arrivals.next()] == [1, None]
    arrivals.end(1)
    assert [arrivals.next(), arrivals.next()] == [3, None]


def test_a_session_of_many_turns_takes_no_more_time_for_each():
    arrivals = Arrivals(traffic_of([([], [1])] * 1000, sessions=[7] * 1000))
    for turn in range(1000):
        assert arrivals.next() == turn
        assert arrivals.next() is None
        arrivals.end(turn)
        assert len(arrivals._ready) <= 1


def test_requests_are_replayed_in_the_order_of_their_times():
    arrivals = Arrivals(traffic_of([([], [1])] * 3, began=[30, 10, 20]))
    assert [arrivals.next() for _ in range(3)] == [1, 2, 0]


def test_the_concurrency_is_that_of_the_log():
    traffic = traffic_of([([], [1])] * 4, began=[0, 1, 2, 10], ended=[5, 3, 4, 11])
    assert traffic.concurrency().tolist() == [1, 2, 3, 1]
    running, most = set(), []

    class Watching(TimedDrafter):
        def start(self, sequence_id, prompt, session):
            running.add(sequence_id)
            most.append(len(running))
            super().start(sequence_id, prompt, session)

        def finish(self, sequence_id, tokens, verified):
            running.discard(sequence_id)
            super().finish(sequence_id, tokens, verified)

    slow = traffic_of([([], [1] * 9)] * 4, began=[0, 1, 2, 10], ended=[5, 3, 4, 11])
    replay(slow, Watching(NgramDrafter(), None, None), concurrency=slow.concurrency(), max_draft=2, cost=0.02)
    assert most[-1] == 1
    assert max(most) <= 3
