"""Corpora that read others, their libraries."""

import numpy as np
import pytest
from hypothesis import given

from ssd import Corpus, DrafterConfig, SuffixDrafter
from ssd.types import Source
from tests.replay import drafter_of, progress_of
from tests.strategies import array, corpus_and_context, examples

TEXT = list(range(100, 140))
TIMEOUT_S = 60


def reader_of(*libraries):
    """Return a drafter over an empty corpus that reads others."""
    drafter = drafter_of()
    drafter.corpus.read_from(*libraries)
    return drafter


def test_drafts_come_from_all_libraries():
    first, second = drafter_of([TEXT]), drafter_of([[7, 8, 9, 10, 11, 12]])
    drafter = reader_of(first.corpus, second.corpus)
    drafts = drafter.propose(TEXT[:8], 3)
    assert drafts.tokens.tolist() == TEXT[8:11]
    assert drafts.source.tolist() == [Source.LIBRARY] * 3
    assert drafter.propose([7, 8, 9], 2).tokens.tolist() == [10, 11]
    drafter.corpus.read_from(second.corpus)
    assert drafter.propose(TEXT[:8], 3).tokens.tolist() == []


def test_accepted_tokens_of_libraries_are_counted():
    drafter = reader_of(drafter_of([TEXT]).corpus)
    drafter.start(1, array(TEXT[:8]))
    drafter.draft(progress_of({1: []}, 3))
    drafter.draft(progress_of({1: TEXT[8:12]}, 3, verified=3))
    assert drafter.stats.counters.by_source[Source.LIBRARY].tolist() == [3, 3]


def test_a_library_is_not_changed():
    library = drafter_of([TEXT])
    learned = [array.copy() for array in library.corpus.learned]
    drafter = reader_of(library.corpus)
    drafter.start(1, array(TEXT[:8]))
    drafter.draft(progress_of({1: []}, 3))
    drafter.draft(progress_of({1: [5, 6]}, 3, verified=1))
    drafter.finish(1, array([7, 8]))
    for corpus in (drafter.corpus, library.corpus):
        corpus.refresh()
    assert library.corpus.requests == 1
    assert drafter.corpus.requests == 1
    for before, after in zip(learned, library.corpus.learned, strict=True):
        np.testing.assert_array_equal(before, after)
    assert library.propose([5, 6, 7], 1).tokens.tolist() == []


def test_running_requests_of_a_library_are_not_read():
    library = drafter_of()
    for sequence in (1, 2):
        library.start(sequence, array([1, 2]))
    library.draft(progress_of({1: TEXT, 2: [3]}, 0))
    library.corpus.refresh()
    assert library.propose(TEXT[:8], 3).tokens.tolist() == TEXT[8:11]
    assert reader_of(library.corpus).propose(TEXT[:8], 3).tokens.tolist() == []


def test_what_a_library_forgets_is_drafted_no_more():
    library = drafter_of()
    library.corpus.append(array(TEXT), "some")
    library.corpus.refresh()
    drafter = reader_of(library.corpus)
    assert drafter.propose(TEXT[:8], 3).tokens.tolist() == TEXT[8:11]
    library.forget("some")
    library.corpus.refresh()
    assert drafter.propose(TEXT[:8], 3).tokens.tolist() == []


@given(corpus_and_context())
@examples(50)
def test_an_empty_library_changes_nothing(drawn):
    requests, context = drawn
    plain, reader = drafter_of(requests), drafter_of(requests)
    reader.corpus.read_from(Corpus(100_000))
    for _ in range(2):
        drafts = [drafter.propose(context, 8) for drafter in (plain, reader)]
        for name in ("tokens", "parents", "accept_prob", "source"):
            np.testing.assert_array_equal(*(getattr(each, name) for each in drafts))
        context = [*context, *drafts[0].tokens.tolist()[:2], 3]


def test_a_corpus_cannot_read_itself():
    corpora = [Corpus(5000) for _ in range(3)]
    corpora[0].read_from(corpora[1])
    corpora[1].read_from(corpora[2])
    for corpus in (corpora[2], corpora[1]):
        with pytest.raises(ValueError, match="a corpus cannot read itself"):
            corpus.read_from(corpora[0])
    with pytest.raises(ValueError, match="a corpus cannot read itself"):
        corpora[2].read_from(corpora[2])
    assert corpora[2].libraries == ()


def test_another_match_depth_is_refused():
    with pytest.raises(ValueError, match="the library has match depth 16, this corpus 32"):
        Corpus(5000).read_from(Corpus(5000, depth=16))


def test_several_drafters_of_a_corpus_read_the_same_libraries():
    corpus = Corpus(5000)
    drafters = [SuffixDrafter(DrafterConfig(), corpus=corpus) for _ in range(2)]
    corpus.read_from(drafter_of([TEXT]).corpus)
    assert [each.propose(TEXT[:8], 2).tokens.tolist() for each in drafters] == [TEXT[8:10]] * 2
