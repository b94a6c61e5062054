"""The article's plain scheme: its two kernels by the slow version, and the drafter around them."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd.build import new_corpus, new_drafter
from ssd.classic import LONGEST_PATTERN, SAMPLES, ArticleCorpus, commonest_continuation, longest_pattern
from ssd.config import DrafterConfig
from ssd.corpus.ring import MIN_CAPACITY
from tests import naive
from tests.replay import progress_of, replay_one
from tests.strategies import LARGEST, array, corpus_and_context

CONFIG = DrafterConfig(capacity=10_000, policy="article")
TEXT = np.random.default_rng(0).integers(0, 1000, 300).astype(np.uint32)


def suffix_array(text):
    return sorted(range(len(text)), key=lambda position: text[position:])


@given(corpus_and_context(), st.integers(1, 12))
@example(([], [1]), 10)
@example(([[1]], []), 10)
@example(([[7] * 20], [7] * 50), 10)
@example(([[LARGEST, 0]], [LARGEST]), 10)
def test_the_longest_pattern_is_found_with_all_its_occurrences(corpus, longest):
    requests, context = corpus
    text = naive.joined(requests)
    order = suffix_array(text)
    left, right, length = longest_pattern(array(text), array(order), array(context), longest)
    for expected in range(min(longest, len(context)), 0, -1):
        pattern = context[len(context) - expected :]
        starts = {p for p in range(len(text) - expected + 1) if text[p : p + expected] == pattern}
        if starts:
            assert (length, set(order[left:right])) == (expected, starts)
            return
    assert (left, right, length) == (0, 0, 0)


@given(corpus_and_context(), st.integers(1, 8))
@example(([[1]], [1]), 4)
@example(([[7] * 20], [7] * 50), 4)
@example(([[1, 2], [3, 4]], [2, 3]), 4)
@example(([[LARGEST, 0]], [LARGEST]), 4)
def test_the_most_frequent_whole_continuation_wins(corpus, limit):
    requests, context = corpus
    text = naive.joined(requests)
    order = suffix_array(text)
    left, right, length = longest_pattern(array(text), array(order), array(context), LONGEST_PATTERN)
    expected, expected_length = naive.article_draft(text, context, limit)
    assert length == expected_length
    start, size, votes = commonest_continuation(array(text), array(order[left:right]), right - left, length, limit)
    assert text[start : start + size] == expected
    assert votes <= right - left


def test_of_equally_frequent_continuations_the_most_recent_wins():
    text = array(naive.joined([[1, 5], [1, 6]]))
    start, size, votes = commonest_continuation(text, array([0, 3]), 2, 1, 3)
    assert (text[start : start + size].tolist(), votes) == ([6], 1)


def article_drafter(requests=(), **settings):
    config = DrafterConfig(**{"capacity": 10_000, "policy": "article", **settings})
    corpus = new_corpus(config)
    for request in requests:
        corpus.append(array(request))
    corpus.refresh()
    return new_drafter(config, corpus=corpus)


@given(corpus_and_context(), st.integers(0, 8))
def test_the_drafter_drafts_as_the_slow_version_does(corpus, limit):
    requests, context = corpus
    with_text = [request for request in requests if request]
    drafter = article_drafter(with_text)
    drafter.start(1, array(context))
    drafts = drafter.draft(progress_of({1: []}, limit))
    expected, _ = naive.article_draft(naive.joined(with_text), context, limit) if limit else ([], 0)
    assert drafts.tokens.tolist() == expected
    assert drafts.parents.tolist() == list(range(-1, len(expected) - 1))


def test_it_looks_for_no_more_than_ten_tokens():
    drafter = article_drafter([list(range(30)), [99, *range(6, 15), 77]] + [[88, *range(5, 15), 66]] * 2)
    drafter.start(1, array(list(range(15))))
    # The first request agrees longest, but ten tokens agree as well elsewhere, and twice.
    assert drafter.draft(progress_of({1: []}, limit=1)).tokens.tolist() == [66]


def test_samples_bound_what_is_counted():
    drafter = article_drafter([[1, 2]] * (3 * SAMPLES))
    drafter.start(1, array([1]))
    drafts = drafter.draft(progress_of({1: []}, limit=3))
    assert (drafts.tokens.tolist(), drafts.accept_prob.tolist()) == ([2], [1.0])


def test_a_repeated_request_takes_far_fewer_steps():
    drafter = article_drafter()
    first = replay_one(drafter, 1, TEXT[:50], TEXT[50:])
    drafter.corpus.refresh()
    second = replay_one(drafter, 2, TEXT[:50], TEXT[50:])
    assert first > 200
    assert second <= 20
    stats = drafter.stats
    assert stats.steps == first + second
    assert stats.committed == stats.accepted + stats.steps == 500


def test_only_the_end_of_a_prompt_is_remembered_and_nothing_that_is_not_to_be():
    drafter = article_drafter(learned_prompt_tokens=2)
    drafter.start(1, array([1, 2, 3, 4]))
    drafter.draft(progress_of({1: [5]}, limit=1))
    drafter.finish(1, array([6]))
    drafter.start(2, array([7]))
    drafter.finish(2, array([8]), learn=False)
    drafter.corpus.refresh()
    assert drafter.corpus.view[0].tolist() == [3, 4, 5, 6, naive.SEPARATOR]


def test_the_newest_requests_are_remembered_up_to_the_capacity():
    corpus = ArticleCorpus(MIN_CAPACITY)
    for number in range(100):
        corpus.append(np.full(99, number, np.uint32))
        assert corpus.tokens <= MIN_CAPACITY
    corpus.refresh()
    assert sorted({*corpus.view[0].tolist()}) == [*range(60, 100), naive.SEPARATOR]
    corpus.append(np.arange(2 * MIN_CAPACITY, dtype=np.uint32))
    corpus.refresh()
    text = corpus.view[0].tolist()
    assert text == [*range(MIN_CAPACITY + 1, 2 * MIN_CAPACITY), naive.SEPARATOR]


def test_a_view_stays_as_it_was():
    corpus = ArticleCorpus(10_000)
    corpus.append(array([1, 2]))
    corpus.refresh()
    view = corpus.view
    corpus.refresh()
    assert corpus.view is view
    corpus.append(array([3]))
    assert corpus.view is view
    corpus.refresh()
    assert view[0].tolist() == [1, 2, naive.SEPARATOR]


@pytest.mark.parametrize("capacity", [-5, 0, 1])
def test_a_capacity_that_remembers_nothing_is_refused(capacity):
    with pytest.raises(ValueError, match="a corpus holds"):
        ArticleCorpus(capacity)


def test_what_cannot_be_is_refused():
    drafter = article_drafter()
    drafter.start(1, array([1, 2, 1]))
    with pytest.raises(ValueError, match="sequence 1 was started before"):
        drafter.start(1, array([1]))
    with pytest.raises(ValueError, match="4,294,967,294"):
        drafter.start(2, array([naive.SEPARATOR]))
    with pytest.raises(ValueError, match="sequence 2 was not started"):
        drafter.finish(2, array([]))
    with pytest.raises(ValueError, match="was offered 0 tokens"):
        drafter.draft(progress_of({1: [1]}, limit=1, verified=1))
    with pytest.raises(ValueError, match="cost"):
        drafter.draft(progress_of({1: [1]}, limit=1, cost=0.0))
    with pytest.raises(ValueError, match="policy='suffix'"):
        new_drafter(CONFIG, corpus=new_corpus(DrafterConfig()))
    with pytest.raises(ValueError, match="policy='article'"):
        new_drafter(DrafterConfig(), corpus=new_corpus(CONFIG))
