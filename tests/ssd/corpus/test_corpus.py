"""The corpus under concurrent readers, its maintainer thread, its log of requests, and arguments that are refused.

Corpora are tiny here and merged in tiny slices. tests.ssd.corpus.test_history compares whole histories with lists.
"""

import math
import os
import sys
import threading

import numpy as np
import pytest

from ssd import DrafterConfig, SuffixDrafter
from ssd.config import MAX_MATCH_DEPTH
from ssd.corpus.corpus import MAINTAINER_NICENESS, Corpus
from ssd.corpus.index import GAP_PART
from ssd.corpus.requests import NO_NAME, RequestLog, hash_of
from ssd.corpus.ring import MAX_CAPACITY, MAX_SLOTS, PAD, Ring, check_capacity
from ssd.types import ROOT
from tests import naive
from tests.replay import progress_of
from tests.ssd.corpora import DEPTH, settle, some_requests, tiny_slices
from tests.strategies import array, examples

CAPACITY = 300
CONFIG = DrafterConfig(match_depth=DEPTH, max_draft=8, cost=0.001)


@pytest.fixture(autouse=True, scope="module")
def tiny_parts():
    with tiny_slices():
        yield


def new_corpus(capacity=CAPACITY):
    return Corpus(capacity, DEPTH)


def draft_after(corpus, context, limit=8):
    with SuffixDrafter(CONFIG, corpus=corpus) as drafter:
        drafter.start(1, array(context))
        return drafter.draft(progress_of({1: []}, limit)).tokens.tolist()


def test_a_request_that_is_merged_in_pieces_is_matched_across_the_cuts():
    corpus = new_corpus(capacity=1000)
    for _ in range(60):
        corpus.append(array([1, 2, 3] * 6))
        corpus.refresh()
        settle(corpus)
    builds, merges = corpus.times.full_builds, corpus.times.merges
    request = list(range(100, 300))
    corpus.append(array(request))
    corpus.refresh()
    settle(corpus)
    assert corpus.times.full_builds == builds
    assert corpus.times.merges > merges + 3
    for at in range(1, len(request)):
        assert draft_after(corpus, request[max(0, at - DEPTH) : at], limit=1) == request[at : at + 1]


@pytest.mark.parametrize(
    "made",
    [{"capacity": capacity} for capacity in (-5, 0, 1, 4_294_967_039)]
    + [{"depth": depth} for depth in (-1, 0, MAX_MATCH_DEPTH + 1)],
)
def test_impossible_corpora_are_refused(made):
    with pytest.raises(ValueError, match="depth" if "depth" in made else "a corpus holds"):
        Corpus(**{"capacity": CAPACITY, "depth": DEPTH, **made})


@pytest.mark.parametrize("capacity", [-1, 0, 2 * PAD - 1, 1 << 32])
def test_impossible_rings_are_refused(capacity):
    with pytest.raises(ValueError, match="a ring has"):
        Ring(capacity)


def test_the_ring_of_the_largest_corpus_has_no_more_slots_than_32_bits_count():
    check_capacity(MAX_CAPACITY)
    assert MAX_CAPACITY + MAX_CAPACITY // GAP_PART <= MAX_SLOTS < MAX_CAPACITY + MAX_CAPACITY // GAP_PART + 17
    with pytest.raises(ValueError, match=f"{MAX_CAPACITY:,} tokens, not {MAX_SLOTS:,}"):
        check_capacity(MAX_SLOTS)


def test_request_ids_are_hashed():
    assert hash_of(None) == NO_NAME
    assert hash_of("a") == hash_of("a") != hash_of("b")
    assert hash_of("") != NO_NAME
    assert -(1 << 63) <= hash_of("ä\ud800") < 1 << 63


def test_adjacent_requests_are_erased_together():
    corpus = new_corpus(capacity=4096)
    for number in range(50):
        corpus.append(array([1, 2, number]), f"{number}", time=100.0 if number in {10, 11, 30} else 1.0 + number)
    corpus.refresh()
    corpus.forget_older_than(corpus.clock() - 60.0)
    corpus.refresh()
    assert (corpus.erasures, corpus.times.forgotten) == (3, 47)
    assert corpus.request_times() == {hash_of(f"{number}"): 100.0 for number in (10, 11, 30)}
    assert [corpus.text_of(f"{number}").tolist() for number in (9, 10, 11, 30)] == [
        [],
        [1, 2, 10],
        [1, 2, 11],
        [1, 2, 30],
    ]


def test_the_log_of_requests_is_read_in_parts(monkeypatch):
    monkeypatch.setattr("ssd.corpus.corpus.ROWS_AT_ONCE", 4)
    corpus = new_corpus(capacity=4096)
    for number in range(10):
        corpus.append(array([1, 2, 3]), f"{number % 7}", time=float(number))
    corpus.refresh()
    assert corpus.request_times() == {hash_of(f"{number % 7}"): float(number) for number in range(10)}


@pytest.mark.parametrize("kept", [1, 700])
def test_a_log_stays_small_when_it_drops_as_it_grows(kept):
    log = RequestLog()
    for number in range(20_000):
        log.add(10 * number, number, float(number))
        log.drop_before(10 * (number - kept))
    assert log.rows["name"].tolist() == list(range(19_999 - kept, 20_000))
    assert log.nbytes <= 4 * 24 * 1024


@pytest.mark.parametrize(
    ("word", "given"),
    [("time", {"time": time}) for time in (math.nan, math.inf, -math.inf)]  # A snapshot could not be loaded.
    + [("tag", {"tag": tag}) for tag in (-1, 1 << 16)]
    + [("token ids", {"tokens": array([1, naive.SEPARATOR])}), ("expected string", {"request_id": 4711})],
)
def test_impossible_requests_are_refused(word, given):
    corpus = new_corpus()
    with pytest.raises((ValueError, TypeError), match=word):
        corpus.append(**{"tokens": array([1, 2]), **given})
    corpus.refresh()
    assert corpus.appended == corpus.tokens == corpus.waiting == 0


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
    rounds = examples(400).max_examples
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


def test_the_maintainer_refreshes_until_it_is_closed_and_can_be_started_again():
    corpus, shown = new_corpus(), threading.Event()
    corpus.times.on_refresh = lambda _: shown.set()
    for number in (10, 20):
        shown.clear()
        corpus.maintain(0.001)
        corpus.append(array([number, number + 1, number + 2]))
        assert shown.wait(60)
        assert draft_after(corpus, [number, number + 1]) == [number + 2]
        corpus.close()
        corpus.append(array([number + 4, number + 5]))
        assert draft_after(corpus, [number + 4]) == []
        corpus.refresh()
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


def test_the_maintainer_finishes_a_merge_without_further_changes():
    corpus, done, requests = new_corpus(), threading.Event(), iter(some_requests(40, size=20))
    while not corpus.is_merging:
        corpus.append(next(requests))
        corpus.refresh()
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
