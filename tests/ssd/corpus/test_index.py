"""The index: sorts of the whole corpus, merges, and views that are held while it changes."""

import threading
import time

import numpy as np
import pytest

from ssd import DrafterConfig, SuffixDrafter
from ssd.corpus import corpus as module
from ssd.corpus import tier
from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import SEPARATOR
from ssd.corpus.view import RING_HEAD, RING_OLDEST
from tests.ssd.corpora import DEPTH, assert_whole, drafts_of, fill, settle, some_requests, text_of
from tests.waiting import eventually


@pytest.mark.parametrize("waiting", [0, 3])
def test_the_end_of_a_request_longer_than_the_corpus_is_kept(waiting):
    corpus = Corpus(20_000, DEPTH)
    fill(corpus, some_requests(50))
    long = some_requests(1, seed=1, size=70_000)[0]
    for request in [*some_requests(waiting), long]:
        corpus.append(request)
    corpus.refresh()
    assert corpus.times.full_builds == 1
    assert np.array_equal(text_of(corpus), np.append(long[-19_999:], SEPARATOR))
    assert_whole(corpus)


def test_refreshes_with_changes_are_timed():
    corpus = Corpus(20_000, DEPTH)
    seconds = []
    corpus.times.on_refresh = seconds.append
    corpus.refresh()
    assert seconds == []
    fill(corpus, some_requests(1))
    assert len(seconds) == 1
    assert seconds[0] > 0
    corpus.refresh()
    assert len(seconds) == 1


def test_a_held_view_blocks_only_the_maintainer(monkeypatch):
    monkeypatch.setattr(tier, "READERS_LIMIT_S", 60)
    corpus, rounds = Corpus(20_000, DEPTH), iter(range(1000))
    fill(corpus, some_requests(100))
    settle(corpus)
    held, before = corpus.view, id(corpus.view)
    orders = [order.positions.copy() for order in held.suffix_arrays]
    oldest, head = (int(held.arrays.ring[entry]) for entry in (RING_OLDEST, RING_HEAD))
    ring = corpus.state().ring
    text = ring.read(oldest, head)
    blocked_at, done = [], threading.Event()

    def write():
        # Enough to wrap around the ring, and to swap every tier many times.
        for number in rounds:
            blocked_at.append(number)
            fill(corpus, some_requests(10, seed=1000 + number, size=1000))
            if number == 40:
                break
        done.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    eventually(lambda: id(corpus.view) != before)
    assert not done.wait(0.5)
    # The writer has published at least one more view, and waits; queries continue.
    drafter = SuffixDrafter(DrafterConfig(capacity=20_000, match_depth=DEPTH), corpus=corpus)
    assert drafts_of(drafter, some_requests(3))
    drafter.close()
    assert not done.is_set()
    assert np.array_equal(ring.read(oldest, head), text)
    for order, before in zip(held.suffix_arrays, orders, strict=True):
        assert np.array_equal(order.positions, before)
    del held, order
    assert done.wait(60)
    writer.join()
    settle(corpus)
    assert_whole(corpus)
    assert not np.array_equal(ring.read(oldest, head), text)


def test_the_queue_is_bounded_while_merges_wait_for_a_reader(monkeypatch):
    """Text beyond the bound is dropped and counted; then everything goes on."""
    monkeypatch.setattr(tier, "READERS_LIMIT_S", 0.01)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(module, "MIN_WAITING", 200_000)
    corpus = Corpus(5000, DEPTH)
    corpus.maintain(0.0005)
    fill(corpus, some_requests(50))
    held = corpus.view
    accepted = [corpus.append(request) for request in some_requests(1000)]
    assert corpus.max_waiting == 200_000
    until = time.monotonic() + 60
    while not corpus.times.dropped:
        assert time.monotonic() < until
        accepted += [corpus.append(request) for request in some_requests(100)]
    assert corpus.times.dropped == accepted.count(False)
    assert corpus.waiting <= 200_100
    # Even now the maintainer can be stopped.
    corpus.close()
    corpus.maintain(0.0005)
    corpus.forget_older_than(-1)
    del held
    corpus.refresh()
    assert corpus.waiting == 0
    for number in range(20):
        assert corpus.append(some_requests(1, seed=number)[0])
    corpus.refresh()
    assert_whole(corpus)
    corpus.close()


def test_without_a_maintainer_a_full_queue_is_merged_at_once(monkeypatch):
    monkeypatch.setattr(module, "MIN_WAITING", 0)
    corpus = Corpus(5000, DEPTH)
    assert all(corpus.append(request) for request in some_requests(500))
    assert corpus.waiting <= 5100
    assert corpus.times.dropped == 0
