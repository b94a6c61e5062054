"""Forgetting requests by id and by age: in the corpus, in running requests and in idle sessions."""

import threading

import numpy as np
import pytest

from ssd import DrafterConfig, SuffixDrafter
from ssd.corpus import live
from ssd.corpus.corpus import Corpus
from tests.replay import progress_of
from tests.ssd.corpora import DEPTH, assert_whole, fill, holds, no_memory, settle, some_requests

CONFIG = DrafterConfig(match_depth=DEPTH)
SECRET = np.arange(1000, 1060, dtype=np.uint32)


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        return self.now


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


def test_text_is_erased_once_it_has_no_readers():
    corpus = Corpus(100_000, DEPTH)
    fill(corpus, [SECRET, *some_requests(20)], "mine")
    held, done = corpus.view, threading.Event()
    corpus.forget("mine")

    def refresh():
        corpus.refresh()
        done.set()

    thread = threading.Thread(target=refresh, daemon=True)
    thread.start()
    assert not done.wait(0.3)
    ring = held.arrays[2]
    assert ring[1] == 0
    # New views do not contain the text, although it is still in the ring.
    assert corpus.view is not held
    assert not draft_after(corpus, SECRET[:20])
    del held
    assert done.wait(30)
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


def run_turn(drafter, number, prompt, output, request):
    drafter.start(number, prompt, session_id="chat", request_id=request)
    drafter.finish(number, output, learn=False)


def test_idle_sessions_with_a_turn_of_that_id_are_dropped():
    clock = Clock()
    drafter = SuffixDrafter(CONFIG, corpus=Corpus(100_000, DEPTH, clock))
    run_turn(drafter, 1, SECRET[:10], SECRET[10:20], "first")
    run_turn(drafter, 2, SECRET[:30], SECRET[30:40], "second")
    held = drafter.memory_bytes()
    drafter.forget("third")
    assert drafter.memory_bytes() == held
    drafter.forget("first")
    assert drafter.memory_bytes() < held
    # A turn that is running finishes, but its index is not kept.
    drafter.start(3, SECRET[:10], session_id="chat", request_id="fourth")
    running = drafter.memory_bytes()
    drafter.forget("fourth")
    drafter.finish(3, SECRET[10:20], learn=False)
    assert drafter.memory_bytes() < running
    drafter.close()


def test_an_index_with_a_forgotten_turn_is_not_kept_after_a_later_turn():
    with SuffixDrafter(CONFIG, corpus=Corpus(100_000, DEPTH)) as drafter:
        run_turn(drafter, 1, SECRET[:10], SECRET[10:20], "first")
        drafter.start(2, SECRET[:30], session_id="chat", request_id="second")
        drafter.forget("first")
        drafter.finish(2, SECRET[30:40], learn=False)
        assert drafter._idle.pop("chat") is None


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


@pytest.mark.parametrize("from_another", [False, True])
def test_a_running_request_is_forgotten(from_another):
    corpus = Corpus(100_000, DEPTH)
    drafter, another = (SuffixDrafter(CONFIG, corpus=corpus) for _ in range(2))
    start_two(drafter)
    if from_another:
        another.forget("mine")
        drafter.forget_own("mine")
    else:
        drafter.forget("mine")
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


def test_a_running_request_is_forgotten_after_a_failure(monkeypatch):
    corpus = Corpus(100_000, DEPTH)
    drafter = SuffixDrafter(CONFIG, corpus=corpus)
    start_two(drafter)
    drafter.forget("mine")
    with monkeypatch.context() as patch:
        patch.setattr(live, "merge_unsorted", no_memory)
        with pytest.raises(MemoryError):
            corpus.refresh()
    corpus.refresh()
    assert draft_of_second(drafter, SECRET[12:19]) == []


def test_other_running_requests_are_not_forgotten():
    drafter = SuffixDrafter(CONFIG, corpus=Corpus(100_000, DEPTH))
    start_two(drafter)
    drafter.forget("theirs")
    drafter.corpus.refresh()
    assert draft_of_second(drafter, SECRET[12:19]) == SECRET[19:27].tolist()
    drafter.finish(1, SECRET[30:])
    drafter.corpus.refresh()
    assert draft_after(drafter.corpus, SECRET[:20])


def test_a_request_is_forgotten_before_its_first_step():
    drafter = SuffixDrafter(CONFIG, corpus=Corpus(100_000, DEPTH))
    drafter.start(1, SECRET[:20], request_id="mine", session_id="chat")
    drafter.forget("mine")
    drafter.start(2, SECRET[:5] + np.uint32(500))
    drafter.draft(progress_of({1: SECRET[20:40]}, 0))
    drafter.corpus.refresh()
    assert draft_of_second(drafter, SECRET[25:32]) == []
    drafter.finish(1, SECRET[40:])
    drafter.corpus.refresh()
    assert drafter.corpus.tokens == 0
    assert drafter._idle.pop("chat") is None


def test_forgetting_an_ended_request_does_not_affect_a_new_one():
    drafter = SuffixDrafter(CONFIG, corpus=Corpus(100_000, DEPTH))
    drafter.start(3, SECRET[:5], request_id="earlier")
    drafter.finish(3, SECRET[5:7], learn=False)
    start_two(drafter)
    drafter.forget_own("earlier")
    drafter.corpus.refresh()
    assert draft_of_second(drafter, SECRET[12:19]) == SECRET[19:27].tolist()


@pytest.mark.parametrize("learned_prompt_tokens", [0, 32, 1 << 20])
def test_a_turn_is_remembered_only_under_its_own_id(learned_prompt_tokens):
    config = DrafterConfig(capacity=100_000, match_depth=DEPTH, learned_prompt_tokens=learned_prompt_tokens)
    drafter = SuffixDrafter(config, corpus=Corpus(100_000, DEPTH))
    prompt, output = np.arange(5000, 5020, dtype=np.uint32), SECRET[:30]
    drafter.start(1, prompt, session_id="chat", request_id="first")
    drafter.draft(progress_of({1: output[:10]}, 0))
    drafter.finish(1, output[10:])
    next_prompt, next_output = prompt + np.uint32(100), output + np.uint32(200)
    drafter.start(2, np.concatenate([prompt, output, next_prompt]), session_id="chat", request_id="second")
    drafter.finish(2, next_output)
    drafter.corpus.refresh()
    assert draft_after(drafter.corpus, output[:10])
    drafter.forget("first")
    drafter.corpus.refresh()
    assert_forgotten(drafter.corpus, output)
    assert_forgotten(drafter.corpus, prompt)
    # The second turn is remembered with the configured part of its own prompt.
    assert drafter.corpus.requests == 1
    assert holds(drafter.corpus, next_output)
    assert holds(drafter.corpus, np.concatenate([next_prompt, next_output])) == (learned_prompt_tokens > 0)


def test_a_committed_prefix_is_remembered():
    drafter = SuffixDrafter(CONFIG, corpus=Corpus(100_000, DEPTH))
    drafter.start(1, SECRET[:10], session_id="chat", committed=SECRET[10:30])
    drafter.finish(1, SECRET[30:31], learn=False)
    drafter.start(2, SECRET[:10], session_id="chat", committed=SECRET[10:31])
    drafter.finish(2, SECRET[31:])
    drafter.corpus.refresh()
    assert holds(drafter.corpus, SECRET[10:])


def test_old_idle_sessions_are_dropped():
    clock = Clock()
    drafter = SuffixDrafter(CONFIG, corpus=Corpus(100_000, DEPTH, clock))
    run_turn(drafter, 1, SECRET[:10], SECRET[10:20], None)
    held = drafter.memory_bytes()
    clock.now += 60
    drafter.forget_older_than(90)
    assert drafter.memory_bytes() == held
    drafter.forget_older_than(30)
    assert drafter.memory_bytes() < held
    drafter.close()
