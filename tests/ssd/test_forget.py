"""Forgetting requests by id and by age: in the corpus, in running requests and in idle sessions."""

import threading

import numpy as np

from ssd import DrafterConfig, SuffixDrafter
from ssd.corpus import tier
from ssd.corpus.corpus import Corpus
from tests.replay import progress_of
from tests.ssd.corpora import DEPTH, assert_whole, fill, holds, settle, some_requests
from tests.waiting import eventually

CONFIG = DrafterConfig(match_depth=DEPTH)
SECRET = np.arange(1000, 1060, dtype=np.uint32)


def draft_after(corpus, context):
    """Return the draft of a new drafter for a context."""
    drafter = SuffixDrafter(CONFIG, corpus=corpus)
    drafter.start(1, context)
    tokens = drafter.draft(progress_of({1: []}, 16)).tokens
    drafter.close()
    return tokens.tolist()


def assert_forgotten(corpus, run=SECRET):
    assert not holds(corpus, run[5:15])
    assert not set(draft_after(corpus, run[:20])) & set(run.tolist())
    assert_whole(corpus)


def test_all_pieces_of_a_long_request_are_forgotten():
    corpus, long = Corpus(200_000, DEPTH), np.arange(20_000, dtype=np.uint32)
    fill(corpus, some_requests(1000))
    fill(corpus, [long], "mine")
    assert corpus.requests > 1001
    command = corpus.forget("mine")
    corpus.refresh()
    assert (corpus.requests, command.requests) == (1000, 1)
    for first in range(100, 20_000, 3000):
        assert not holds(corpus, long[first : first + 3])
    assert_whole(corpus)


def test_text_that_is_no_longer_indexed_is_erased():
    corpus = Corpus(30_000, DEPTH)
    fill(corpus, [SECRET], "mine")
    fill(corpus, some_requests(600))
    settle(corpus)
    assert not draft_after(corpus, SECRET[:20])
    assert holds(corpus, SECRET)
    corpus.forget("mine")
    corpus.refresh()
    assert not holds(corpus, SECRET[5:10])


def test_forgetting_nothing_changes_nothing():
    corpus = Corpus(100_000, DEPTH)
    fill(corpus, some_requests(20), "theirs")
    orders = corpus.view.suffix_arrays
    corpus.forget("mine")
    corpus.forget_older_than(3600)
    corpus.refresh()
    assert corpus.view.suffix_arrays[0] is orders[0]
    assert corpus.times.forgotten == 0


def test_text_is_erased_once_it_has_no_readers(monkeypatch):
    monkeypatch.setattr(tier, "READERS_LIMIT_S", 60)
    corpus = Corpus(100_000, DEPTH)
    fill(corpus, [SECRET, *some_requests(20)], "mine")
    held, before, done, ring = corpus.view, id(corpus.view), threading.Event(), corpus.state().ring
    corpus.forget("mine")

    def refresh():
        corpus.refresh()
        done.set()

    thread = threading.Thread(target=refresh, daemon=True)
    thread.start()
    eventually(lambda: id(corpus.view) != before)
    assert not done.wait(0.3)
    # New views do not contain the text, although it is still in the ring.
    assert SECRET.tobytes() in ring.slots.tobytes()
    assert not draft_after(corpus, SECRET[:20])
    del held
    assert done.wait(60)
    assert_forgotten(corpus)


def test_a_running_copy_stops_when_its_source_is_forgotten():
    corpus = Corpus(100_000, DEPTH)
    fill(corpus, [SECRET], "mine")
    drafter = SuffixDrafter(CONFIG, corpus=corpus)
    drafter.start(1, SECRET[:20])
    assert drafter.draft(progress_of({1: []}, 4)).tokens.tolist() == SECRET[20:24].tolist()
    corpus.forget("mine")
    corpus.refresh()
    # The pointer of the sequence still points to the position of the erased text.
    assert not drafter.draft(progress_of({1: SECRET[20:22]}, 4)).tokens.tolist()


def start_two(drafter):
    """Start sequence 1, and sequence 2 which drafts from its output."""
    drafter.start(1, SECRET[:5], request_id="mine")
    # Its own tokens must not become fallback candidates: it commits those of sequence 1.
    drafter.start(2, SECRET[:5] + np.uint32(500), learn=False)
    drafter.draft(progress_of({1: SECRET[5:30]}, 0))
    drafter.corpus.refresh()
    assert draft_of_second(drafter, SECRET[5:12]) == SECRET[12:20].tolist()


def draft_of_second(drafter, tokens):
    return drafter.draft(progress_of({2: tokens}, 8, cost=1e-6)).tokens.tolist()


def test_a_running_request_is_forgotten_through_another_drafter():
    corpus = Corpus(100_000, DEPTH)
    drafter, another = (SuffixDrafter(CONFIG, corpus=corpus) for _ in range(2))
    start_two(drafter)
    another.forget("mine")
    drafter.forget_own("mine")
    corpus.refresh()
    assert draft_of_second(drafter, SECRET[12:19]) == []
    # The request continues, and drafts from its own text.
    drafter.draft(progress_of({1: SECRET[30:40]}, 0))
    own = drafter.draft(progress_of({1: SECRET[5:12]}, 8, cost=1e-6)).tokens
    assert own.tolist() == SECRET[12:20].tolist()
    corpus.refresh()
    assert draft_of_second(drafter, SECRET[19:35]) == []
    drafter.finish(1, SECRET[40:])
    # Sequence 2 had committed the same text.
    drafter.finish(2, np.empty(0, np.uint32), learn=False)
    corpus.refresh()
    assert corpus.tokens == 0
    assert_forgotten(corpus)
    # Later requests of that id are remembered.
    drafter.start(1, SECRET[:5], request_id="mine")
    drafter.finish(1, SECRET[5:])
    corpus.refresh()
    assert draft_after(corpus, SECRET[:20])
