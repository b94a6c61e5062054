"""The corpus remembers the newest text, and readers never see a partial merge or overwritten text.

Corpora are tiny here and merged in tiny slices, so that a few requests wrap around the ring many times.
"""

import math
import os
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd import DrafterConfig, SuffixDrafter
from ssd.config import MAX_MATCH_DEPTH
from ssd.corpus.corpus import MAINTAINER_NICENESS, Corpus
from ssd.corpus.ring import PAD
from ssd.types import ROOT
from tests import naive
from tests.replay import progress_of
from tests.ssd.addresses import uint32_at
from tests.ssd.corpora import some_requests, tiny_slices
from tests.strategies import ALPHABETS, array, examples

CAPACITY = 300
DEPTH = 8
CONFIG = DrafterConfig(match_depth=DEPTH, max_draft=8, cost=0.001)


@pytest.fixture(autouse=True, scope="module")
def tiny_parts():
    with tiny_slices():
        yield


def new_corpus(capacity=CAPACITY):
    return Corpus(capacity, DEPTH)


def settle(corpus):
    """Refresh until everything is merged."""
    corpus.refresh()
    while corpus.is_merging:
        corpus.refresh()


class Contents:
    """Text and suffix arrays of finished requests in a view, copied."""

    def __init__(self, view):
        tiers, _, of_ring = view.arrays
        address, self.oldest, self.head, self.slots = of_ring.tolist()
        self.memory = uint32_at(address - 4 * PAD, self.slots + 2 * PAD).tolist()
        self.orders = [uint32_at(order, size).tolist() for text, order, size, *_ in tiers.tolist() if text == address]
        self.text = [self.memory[PAD + position % self.slots] for position in range(self.oldest, self.head)]


def assert_is_whole(contents, appended, capacity=CAPACITY):
    """Check that the suffix arrays contain exactly the positions of the newest text, each once and sorted."""
    everything = naive.concatenated(appended)
    assert min(capacity, len(everything)) <= len(contents.text) <= contents.slots
    assert contents.text == everything[len(everything) - len(contents.text) :]
    # Keys of the first positions extend into overwritten text.
    readable = DEPTH if contents.oldest > 0 else 0
    expected = [position for position in naive.usable_positions(contents.text) if position >= readable]
    positions = [(slot - contents.oldest) % contents.slots for order in contents.orders for slot in order]
    assert sorted(positions) == expected
    for order in contents.orders:
        # Kernels read the ring including its padding.
        keys = [naive.key(contents.memory, PAD + slot, DEPTH) for slot in order]
        assert keys == sorted(keys)
        assert keys == [naive.key(contents.text, (slot - contents.oldest) % contents.slots, DEPTH) for slot in order]


def histories():
    """Generate lists of the requests that are appended between refreshes, over one alphabet."""
    return ALPHABETS.flatmap(
        lambda alphabet: st.lists(
            st.lists(st.lists(st.sampled_from(alphabet), max_size=28), max_size=6), min_size=1, max_size=30
        )
    )


@given(histories(), st.integers(CAPACITY, CAPACITY + 100))
@examples(60)
def test_every_view_contains_all_of_the_newest_text(history, capacity):
    corpus, appended = new_corpus(capacity), []
    for requests in history:
        for request in requests:
            corpus.append(array(request))
        corpus.refresh()
        appended += requests
        assert_is_whole(Contents(corpus.view), appended, capacity)
    settle(corpus)
    assert_is_whole(Contents(corpus.view), appended, capacity)


@pytest.mark.parametrize("most", [1, 5, 30])
def test_views_are_consistent_while_the_ring_wraps_many_times(most):
    corpus, appended, rng = new_corpus(), [], np.random.default_rng(most)
    for step in range(2500 // most):
        appended.append(rng.integers(0, 5, rng.integers(1, most + 1)).tolist())
        corpus.append(array(appended[-1]))
        if step % 3:
            corpus.refresh()
            assert corpus.indexed == len(naive.concatenated(appended))
        if step % 15 == 1:
            assert_is_whole(Contents(corpus.view), appended)
    settle(corpus)
    assert_is_whole(Contents(corpus.view), appended)
    assert corpus.indexed > 2 * (CAPACITY + 128)
    assert corpus.times.base_merges > 10


def draft_after(corpus, context, limit=8):
    with SuffixDrafter(CONFIG, corpus=corpus) as drafter:
        drafter.start(1, array(context))
        return drafter.draft(progress_of({1: []}, limit)).tokens.tolist()


def test_a_request_is_drafted_from_the_next_refresh_until_it_is_overwritten():
    corpus = new_corpus()
    size = 20
    requests = [list(range(100 * number, 100 * number + size)) for number in range(1, 200)]
    for number, request in enumerate(requests):
        corpus.append(array(request))
        assert draft_after(corpus, request[:3]) == []
        corpus.refresh()
        assert draft_after(corpus, request[:3]) == request[3:11]
        if number % 10 == 0:
            newest = requests[max(0, number + 1 - CAPACITY // (size + 1)) : number + 1]
            # The oldest request may begin with tokens whose keys are overwritten.
            assert all(draft_after(corpus, request[-4:-1]) == request[-1:] for request in newest[1:])
            settle(corpus)
            room = (Contents(corpus.view).slots) // (size + 1) + 1
            assert not any(draft_after(corpus, request[:3]) for request in requests[: max(0, number + 1 - room)])
    assert corpus.tokens <= Contents(corpus.view).slots


def test_a_request_that_is_merged_in_pieces_is_matched_across_the_cuts():
    corpus = new_corpus(capacity=1000)
    for _ in range(60):
        corpus.append(array([1, 2, 3] * 6))
        settle(corpus)
    builds, merges = corpus.times.full_builds, corpus.times.merges
    request = list(range(100, 300))
    corpus.append(array(request))
    settle(corpus)
    assert corpus.times.full_builds == builds
    assert corpus.times.merges > merges + 3
    for at in range(1, len(request)):
        assert draft_after(corpus, request[max(0, at - DEPTH) : at], limit=1) == request[at : at + 1]


def test_append_copies_its_tokens():
    """The caller may reuse the array before the maintainer reads it."""
    corpus, tokens = new_corpus(), array([1, 2, 3, 4])
    corpus.append(tokens)
    tokens[:] = 77
    corpus.refresh()
    assert draft_after(corpus, [1, 2]) == [3, 4]


def test_a_finished_output_is_copied():
    """The session's next turn is written to the same memory."""
    with SuffixDrafter(CONFIG, corpus=new_corpus()) as drafter:
        drafter.start(1, array([1, 2]), session_id="chat")
        drafter.finish(1, array([3, 4]))
        drafter.start(2, array([1, 9, 9, 9]), session_id="chat")
        drafter.corpus.refresh()
        assert draft_after(drafter.corpus, [1, 2]) == [3, 4]


def test_an_empty_request_is_not_stored():
    corpus = new_corpus()
    corpus.append(array([]))
    corpus.refresh()
    assert corpus.indexed == corpus.tokens == 0


def test_a_reserved_token_is_refused():
    corpus = new_corpus()
    with pytest.raises(ValueError, match="4,294,967,294"):
        corpus.append(array([1, naive.SEPARATOR]))
    corpus.refresh()
    assert corpus.tokens == 0


@pytest.mark.parametrize("capacity", [-5, 0, 1, 4_294_967_039])
def test_impossible_capacities_are_refused(capacity):
    with pytest.raises(ValueError, match=f"a corpus holds .* not {capacity:,}"):
        new_corpus(capacity)


@pytest.mark.parametrize("depth", [-1, 0, MAX_MATCH_DEPTH + 1])
def test_impossible_match_depths_are_refused(depth):
    with pytest.raises(ValueError, match="depth must be 1 to 64"):
        Corpus(CAPACITY, depth)


@pytest.mark.parametrize("time", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_not_finite_is_refused(time):
    corpus = new_corpus()
    # A snapshot that contained it could not be loaded.
    with pytest.raises(ValueError, match="time must be a finite number"):
        corpus.append(array([1, 2]), time=time)
    corpus.refresh()
    assert corpus.appended == corpus.tokens == 0


@pytest.mark.parametrize("tag", [-1, 1 << 16])
def test_a_tag_of_more_than_16_bits_is_refused(tag):
    with pytest.raises(ValueError, match="tag must have 16 bits"):
        Corpus(4096).append(array([1, 2]), tag=tag)


KINDS = 3
WORDS = 1000


def successors(token):
    """Return text in which each token is followed by one of KINDS others."""
    return [(7 * token + 13 * kind + 1) % WORDS for kind in range(KINDS)]


def sentence(rng, size):
    words = [int(rng.integers(WORDS))]
    while len(words) < size:
        words.append(successors(words[-1])[int(rng.integers(KINDS))])
    return words


def repeat_until(stopped, problems, work):
    """Repeat work until the test ends, and keep the exception."""
    try:
        while not stopped.is_set():
            work()
    except Exception as problem:
        problems.append(problem)


def test_drafts_during_maintenance_contain_only_known_transitions():
    """In intact text each token is a successor of the previous one; in overwritten text that would be unlikely."""
    # With matches of at most 5 tokens no pointer is set. Pointers predict tokens even after a mismatch.
    config = DrafterConfig(capacity=CAPACITY, match_depth=5, max_draft=32, cost=1e-4, draft_shape="tree")
    corpus, rng, other_rng = Corpus(CAPACITY, config.match_depth), np.random.default_rng(0), np.random.default_rng(1)

    def maintain():
        for _ in range(3):
            corpus.append(array(sentence(other_rng, int(other_rng.integers(2, 30)))))
        corpus.refresh()

    stopped, problems = threading.Event(), []
    maintainer = threading.Thread(target=repeat_until, args=(stopped, problems, maintain), daemon=True)
    maintainer.start()
    drafted = 0
    rounds = 400 * settings().max_examples // settings.get_profile("project").max_examples
    with SuffixDrafter(config, corpus=corpus) as drafter:
        for _ in range(rounds):
            prompts = {number: sentence(rng, 12) for number in range(8)}
            for number, prompt in prompts.items():
                drafter.start(number, array(prompt))
            drafts = drafter.draft(progress_of(dict.fromkeys(prompts, ()), limit=32))
            for number, prompt in prompts.items():
                own = slice(drafts.offsets[number], drafts.offsets[number + 1])
                tokens, parents = drafts.tokens[own].tolist(), drafts.parents[own].tolist()
                for token, parent in zip(tokens, parents, strict=True):
                    assert token in successors(tokens[parent] if parent != ROOT else prompt[-1])
                drafted += len(tokens)
                drafter.finish(number, array([]), learn=False)
    stopped.set()
    maintainer.join(60)
    assert not maintainer.is_alive()
    assert not problems
    assert drafted > rounds
    assert corpus.times.base_merges > 10


def test_the_maintainer_refreshes_until_it_is_closed():
    corpus = new_corpus()
    shown = threading.Event()
    refresh = corpus.refresh
    corpus.refresh = lambda: (refresh(), shown.set() if corpus.indexed else None)
    corpus.maintain(0.001)
    corpus.append(array([1, 2, 3]))
    assert shown.wait(60)
    assert draft_after(corpus, [1, 2]) == [3]
    corpus.close()
    corpus.append(array([4, 5]))
    assert draft_after(corpus, [4]) == []
    corpus.close()


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is not one of a thread elsewhere")
def test_drafting_threads_precede_the_maintainer():
    corpus, refreshed, niceness = new_corpus(), threading.Event(), []
    corpus.refresh = lambda: (niceness.append(os.nice(0)), refreshed.set())
    corpus.maintain(0.001)
    corpus.append(array([1, 2, 3]))
    assert refreshed.wait(60)
    corpus.close()
    assert niceness[0] == min(19, os.nice(0) + MAINTAINER_NICENESS)


def test_the_maintainer_can_be_started_again():
    corpus = new_corpus()
    corpus.maintain(0.001)
    corpus.close()
    refreshed, refresh = threading.Event(), corpus.refresh
    corpus.refresh = lambda: (refresh(), refreshed.set() if corpus.indexed else None)
    corpus.maintain(0.001)
    corpus.append(array([1, 2, 3]))
    assert refreshed.wait(10)
    corpus.close()
    assert draft_after(corpus, [1, 2]) == [3]


def test_the_maintainer_finishes_a_merge_without_further_changes():
    corpus, done = new_corpus(), threading.Event()
    for request in some_requests(40, size=20):
        corpus.append(request)
        corpus.refresh()
        if corpus.is_merging:
            break
    assert corpus.is_merging
    corpus.times.on_refresh = lambda _: None if corpus.is_merging else done.set()
    corpus.maintain(0.001)
    corpus.append(array([1]))
    assert done.wait(60)
    corpus.close()


def test_the_maintainer_repeats_a_failed_merge_without_further_changes(monkeypatch, caplog):
    corpus, shown = new_corpus(), threading.Event()
    refresh, failures = corpus.refresh, iter([MemoryError, MemoryError])

    def refresh_or_fail():
        if failure := next(failures, None):
            raise failure
        refresh()
        if corpus.indexed:
            shown.set()

    monkeypatch.setattr("ssd.corpus.corpus.RETRY_S", 0.001)
    monkeypatch.setattr(corpus, "refresh", refresh_or_fail)
    corpus.maintain(0.001)
    corpus.append(array([1, 2, 3]))
    assert shown.wait(60)
    corpus.close()
    assert draft_after(corpus, [1, 2]) == [3]
    assert caplog.text.count("drafts come from the last view") == 2
