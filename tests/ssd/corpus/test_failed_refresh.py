"""A refresh that fails, for want of memory, loses no text, and the next one completes it."""

from itertools import count

import numpy as np
import pytest

from ssd.corpus import index, live, merge, tier
from ssd.corpus.corpus import Corpus
from tests.ssd.corpora import DEPTH, assert_whole, holds, some_requests, text_of, tiny_slices
from tests.strategies import array

CAPACITY = 300
FORGOTTEN = [70, 71, 72, 73]

STEPS = [
    (index.Index, "_make_view"),
    (index, "Merge"),
    (index, "add_sorted"),
    (index, "sort_in_threads"),
    (index, "keep_positions"),
    (live, "merge_unsorted"),
    (merge, "merge_unsorted"),
    (merge, "find_places"),
    (merge, "merge_some"),
]
"""Functions called by a refresh that may fail."""


@pytest.fixture(autouse=True)
def tiny_parts():
    with tiny_slices():
        yield


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """Fail where the only thread would wait for itself."""
    wait = tier.Tier.wait_until_unread

    def wait_or_fail(self, timeout_s):
        is_unread = wait(self, 0)
        assert is_unread or timeout_s < tier.READERS_LIMIT_S, (
            "the refresh waits for a suffix array that the index holds itself"
        )
        return is_unread

    monkeypatch.setattr(tier.Tier, "wait_until_unread", wait_or_fail)


def failing_at(call, function):
    """Return `function`, which raises MemoryError at its call number `call`."""
    calls = count()

    def call_or_fail(*given):
        if next(calls) == call:
            raise MemoryError
        return function(*given)

    return call_or_fail


def has_failed_once(corpus):
    """Append, run and forget requests with a refresh each, and another one after a failure; return whether one failed.

    Exceptions are kept, as by a log handler.
    """
    kept = []

    def refresh():
        try:
            corpus.refresh()
        except MemoryError as problem:
            kept.append(problem)
            corpus.refresh()

    for number, request in enumerate(some_requests(40, size=20)):
        corpus.append(request)
        if number % 20 == 10:
            for tokens in some_requests(9, seed=number, size=20):
                corpus.append(tokens)
        if number % 20 == 5:
            corpus.append(array(FORGOTTEN), "secret")
        if number % 20 == 9:
            corpus.forget("secret")
        owner = corpus.start_running(request[:3])
        corpus.extend_running(np.array([owner]), request[3:7], array([0, 4]))
        refresh()
        corpus.end_running(owner)
    while corpus.is_merging:
        refresh()
    return len(kept) > 0


@pytest.mark.parametrize(("module", "name"), STEPS, ids=[name for _, name in STEPS])
def test_a_refresh_after_a_failure_completes_it(module, name, monkeypatch):
    expected = Corpus(CAPACITY, DEPTH)
    assert not has_failed_once(expected)
    function = getattr(module, name)
    for call in count():
        corpus = Corpus(CAPACITY, DEPTH)
        monkeypatch.setattr(module, name, failing_at(call, function))
        if not has_failed_once(corpus):
            break
        assert_whole(corpus)
        assert not holds(corpus, array(FORGOTTEN))
        assert corpus.requests > 10
        kept = min(corpus.tokens, expected.tokens)
        assert np.array_equal(text_of(corpus)[-kept:], text_of(expected)[-kept:])
        assert corpus.indexed == expected.indexed
        assert corpus.waiting == expected.waiting
    assert call > 1
