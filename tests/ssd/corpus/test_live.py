"""The live tier: the output of running requests, which is drafted for others."""

import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.corpus.corpus import Corpus
from ssd.corpus.live import BLOCK, LiveTier
from ssd.corpus.tier import ReadersError
from tests import naive
from tests.replay import drafter_of, progress_of
from tests.ssd.addresses import uint32_at
from tests.ssd.corpora import DEPTH, evidence_in, evidence_of
from tests.strategies import array, examples


def evidence(tier):
    return evidence_in(tier.tier.newest.positions, tier.address)


@given(
    st.lists(
        st.tuples(st.sampled_from(["extend", "extend", "skip", "finish", "merge", "merge"]), st.integers(0, 1)),
        min_size=20,
        max_size=60,
    ),
    st.integers(2, 3),
)
@examples(100)
def test_output_without_room_is_left_out(events, blocks):
    """Two requests, of which all tokens differ; ample room is that of tests.ssd.corpus.test_history."""
    tier, running, tokens, numbers = LiveTier(blocks, DEPTH), {}, iter(range(100_000)), iter(range(1000))
    for event, owner in [*events, ("merge", 0)]:
        run = [next(tokens) for _ in range(5)]
        if event == "merge":
            tier.merge()
            assert evidence(tier) <= sum((evidence_of(*own) for _, *own in running.values()), Counter())
        elif owner not in running:
            running[owner] = (next(numbers), run, [], set())
            tier.start(running[owner][0], array(run))
        else:
            number, prefix, produced, skipped = running[owner]
            if event == "finish":
                del running[owner]
                tier.finish(number)
                continue
            skipped.update(range(len(produced), len(produced) + 5) if event == "skip" else ())
            produced += run
            tier.skip(number, array([*prefix, *produced])) if event == "skip" else tier.extend(number, array(run))


def test_a_request_without_room_continues_after_a_gap():
    tier = LiveTier(blocks=2, depth=DEPTH)
    tier.start(1, array([1]))
    tier.extend(1, array([2]))
    tier.start(2, array([5, 6]))
    tier.extend(2, array([7, 8]))  # no block is free
    tier.finish(1)
    tier.merge()
    tier.extend(2, array([9]))  # still no free block: the previous suffix array refers to it
    # There is no new text, but the block must become free.
    tier.merge()
    tier.extend(2, array([10]))
    tier.merge()
    assert evidence(tier) == evidence_of([5, 6, 7, 8, 9], [10])


def test_a_block_is_reused_only_when_it_has_no_readers(monkeypatch):
    monkeypatch.setattr("ssd.corpus.tier.READERS_LIMIT_S", 0.01)
    tier = LiveTier(blocks=3, depth=DEPTH)
    for owner in (1, 3):
        tier.start(owner, array([owner]))
        tier.extend(owner, array([2]))
    tier.merge()
    read = tier.tier.newest
    tier.finish(1)
    tier.start(2, array([5]))
    tier.merge()
    tier.merge()
    tier.extend(3, array([4]))
    with pytest.raises(ReadersError):
        tier.merge()
    tier.extend(2, array([6]))
    assert uint32_at(tier.address + 4 * BLOCK, 3).tolist() == [naive.SEPARATOR, 1, 2]
    del read
    tier.merge()
    tier.extend(2, array([7]))
    tier.merge()
    assert evidence(tier) == evidence_of([5, 6], [7]) + evidence_of([3], [2, 4])


@pytest.mark.parametrize("room", range(DEPTH + 4))
def test_a_gap_near_the_end_of_a_block_stays_inside_it(room):
    tier = LiveTier(blocks=4, depth=DEPTH)
    for owner in (1, 2):
        tier.start(owner, array([]))
    produced = list(range(1, BLOCK - room))
    # The block of request 1 follows that of request 2.
    tier.extend(2, array(produced))
    tier.extend(1, array([5000, 5001, 5002]))
    gap = list(range(2000, 2000 + 3 * DEPTH))
    tier.skip(2, array([*produced, *gap]))
    tier.extend(2, array([3000, 3001]))
    tier.merge()
    skipped = range(len(produced), len(produced) + len(gap))
    own = evidence_of([], [*produced, *gap, 3000, 3001], skipped)
    assert evidence(tier) == own + evidence_of([], [5000, 5001, 5002])


@pytest.mark.parametrize("missed", [1, DEPTH, 3 * DEPTH])
def test_gaps_take_no_more_room_than_the_output(missed):
    """Publishing starts and stops, since another request starts and finishes in every round."""
    with drafter_of(match_depth=DEPTH) as drafter:
        drafter.start(1, array([3]))
        drafter.corpus.refresh()
        held, rounds = drafter.corpus.nbytes, 600 // missed
        for turn in range(rounds):
            drafter.start(2, array([5]))
            draft(drafter, 1, [10 * turn], limit=0)
            drafter.finish(2, array([]), learn=False)
            draft(drafter, 1, np.arange(10_000, 10_000 + missed), limit=0)
            drafter.corpus.refresh()
        produced = rounds * (1 + missed)
        # One more block, and the prefix of each block.
        assert drafter.corpus.nbytes - held <= 4 * 1.2 * produced + 8 * produced + 4 * BLOCK


def draft(drafter, sequence_id, tokens=(), limit=8):
    return drafter.draft(progress_of({sequence_id: tokens}, limit, cost=0.001)).tokens.tolist()


@pytest.mark.parametrize("committed", [0, 2])
def test_output_from_before_others_started_is_drafted_without_a_gap(committed):
    text = np.arange(15, dtype=np.uint32)
    given, first = text[:10], 10 - committed
    with drafter_of() as drafter:
        drafter.start(1, given[:first], committed=given[first:])
        draft(drafter, 1, text[10:13])
        drafter.start(2, given)
        draft(drafter, 1, text[13:])
        drafter.corpus.refresh()
        assert draft(drafter, 2) == text[10:].tolist()


@pytest.mark.parametrize(("missed", "is_drafted"), [(1, True), (DEPTH, True), (DEPTH + 1, False)])
@pytest.mark.parametrize("restarts", [False, True])
def test_no_more_than_the_match_depth_of_earlier_output_is_published(missed, is_drafted, restarts):
    output = np.arange(10, 12 + missed)
    with drafter_of(match_depth=DEPTH) as drafter:
        drafter.start(1, array([1, 2, 3]))
        if restarts:  # Publishing has begun and ended before.
            drafter.start(3, array([9]))
            draft(drafter, 1, limit=0)
            drafter.finish(3, array([]), learn=False)
        draft(drafter, 1, output[:missed], limit=0)
        drafter.start(2, array([2, 3]))
        draft(drafter, 1, output[missed:], limit=0)
        drafter.corpus.refresh()
        assert draft(drafter, 2) == (output[:8].tolist() if is_drafted else [])
        # After the gap, output is drafted in any case.
        assert draft(drafter, 2, output[: missed + 1]) == output[missed + 1 :].tolist()


@pytest.mark.parametrize(
    "change",
    [
        lambda corpus: corpus.start_running(array([1])),
        lambda corpus: corpus.skip_running(0, array([1])),
        lambda corpus: corpus.hide_running(0),
        lambda corpus: corpus.end_running(0),
        lambda corpus: corpus.extend_running(np.zeros(1, int), array([1]), array([0, 1])),
        lambda corpus: corpus.forget("unknown"),
    ],
    ids=["begin", "skip", "hide", "end", "extend", "forget"],
)
def test_every_change_wakes_the_maintainer(change):
    corpus, refreshed = Corpus(5000), threading.Event()
    corpus.times.on_refresh = lambda _: refreshed.set()
    corpus.maintain(0.001)
    for each in (lambda corpus: corpus.append(array([1])), change):
        refreshed.clear()
        each(corpus)
        assert refreshed.wait(5)
    corpus.close()


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.sampled_from(["path", "tree"]))
@examples(40)
def test_a_request_does_not_use_its_own_text_in_the_live_tier(output, shape):
    def drafts(is_refreshed):
        with drafter_of([[0, 1, 2, 0, 0]], draft_shape=shape) as drafter:
            drafter.start(1, array([2, 1, 0]))
            drafter.start(2, array([100]))
            drafter.draft(progress_of({1: output}, limit=0))
            if is_refreshed:
                drafter.corpus.refresh()
            drafts = drafter.draft(progress_of({1: []}, limit=16, cost=0.001))
            return [drafts.tokens.tolist(), drafts.source.tolist(), drafts.accept_prob.tolist()]

    assert drafts(is_refreshed=True) == drafts(is_refreshed=False)
