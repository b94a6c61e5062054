"""The baseline drafters: prompt lookup, and the one over a corpus, compared with slow references."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd import ClassicDrafter, Corpus, DrafterConfig, SuffixDrafter, snapshot
from ssd.baselines.ngram import look_up
from tests import naive
from tests.replay import progress_of
from tests.strategies import array, corpus_and_context, tokens
from tests.waiting import eventually

CONFIG = DrafterConfig(capacity=10_000)
TEXT = np.random.default_rng(0).integers(0, 1000, 300).astype(np.uint32)


def classic_drafter(requests=(), **settings):
    corpus = Corpus.from_config(CONFIG)
    for request in requests:
        corpus.append(array(request))
    corpus.refresh()
    return ClassicDrafter(CONFIG, corpus=corpus, **settings)


def draft_after(drafter, context, limit=8):
    drafter.start(1, array(context))
    return drafter.draft(progress_of({1: []}, limit))


@given(corpus_and_context(), st.integers(0, 8), st.integers(1, 12), st.integers(0, 8))
def test_drafts_that_count_all_matches_equal_the_slow_reference(corpus, limit, longest, refreshed):
    """Requests are in several tiers: some are merged together, the others one by one."""
    requests, context = corpus
    requests = [request for request in requests if request]
    with classic_drafter(requests[:refreshed], most=0, longest=longest) as drafter:
        for request in requests[refreshed:]:
            drafter.corpus.append(array(request))
            drafter.corpus.refresh()
        drafts = draft_after(drafter, context, limit)
    expected, _ = naive.classic_draft(naive.concatenated(requests), context, limit, longest) if limit else ([], 0)
    assert drafts.tokens.tolist() == expected
    assert drafts.parents.tolist() == list(range(-1, len(expected) - 1))


def test_at_most_ten_tokens_are_searched_for_by_default():
    requests = [list(range(30)), [99, *range(6, 15), 77], *[[88, *range(5, 15), 66]] * 2]
    # The first request matches the longest context, but ten tokens match as well elsewhere, and twice.
    assert draft_after(classic_drafter(requests), list(range(15)), limit=1).tokens.tolist() == [66]
    assert draft_after(classic_drafter(requests, longest=15), list(range(15)), limit=1).tokens.tolist() == [15]


def test_the_most_recent_of_equally_frequent_continuations_is_drafted():
    for last in (5, 6):
        assert draft_after(classic_drafter([[1, 11 - last], [1, last]]), [1]).tokens.tolist() == [last]


def test_a_sample_of_the_matches_is_counted():
    requests = [[1, 2]] * 60 + [[1, 3]] * 40
    drafts = draft_after(classic_drafter(requests, most=0), [1])
    assert (drafts.tokens.tolist(), drafts.accept_prob.tolist()) == ([2], pytest.approx([0.6]))
    share = draft_after(classic_drafter(requests, most=10), [1]).accept_prob[0]
    assert share >= 0.5
    assert 10 * share == pytest.approx(round(10 * share))


def test_new_text_is_found_after_the_next_refresh():
    with ClassicDrafter(DrafterConfig(capacity=10_000, refresh_interval_s=0.01)) as drafter:
        drafter.corpus.append(array([1, 2, 3]))
        eventually(lambda: drafter.propose([1]).tokens.tolist() == [2, 3])


def test_a_corpus_of_the_suffix_drafter_is_drafted_from(tmp_path):
    with SuffixDrafter(DrafterConfig(capacity=10_000)) as suffix:
        suffix.start(1, array([1, 2]))
        suffix.finish(1, array([3, 4]))
        snapshot.save(suffix.corpus, tmp_path / "corpus.ssd")
    loaded = snapshot.load(tmp_path / "corpus.ssd")
    assert (loaded.corpus.capacity, loaded.corpus.depth) == (10_000, 32)
    assert ClassicDrafter(corpus=loaded.corpus).propose([2]).tokens.tolist() == [3, 4]


def test_no_more_context_is_matched_than_the_corpus_has_in_its_keys():
    corpus = Corpus(10_000, 2)
    for request in ([9, 1, 2, 5], [8, 1, 2, 6], [8, 1, 2, 6]):
        corpus.append(array(request))
    corpus.refresh()
    assert draft_after(ClassicDrafter(corpus=corpus), [9, 1, 2]).tokens.tolist() == [6]


@given(tokens(max_size=30), st.integers(0, 8))
@example([], 4)
@example([7] * 20, 8)
@example([1, 2, 1, 2], 8)
def test_look_up_is_prompt_lookup(text, limit):
    assert look_up(array(text), limit).tokens.tolist() == naive.ngram_draft(text, limit)
