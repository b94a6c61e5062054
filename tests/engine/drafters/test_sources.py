"""Names and counts of the sources of draft tokens."""

import numpy as np

from engine.drafters.registry import KINDS
from engine.drafters.sources import SOURCE_NAMES, DraftCounts, DraftSource, count_sources, counts_by_name, sum_by_name
from ssd.types import Source


def test_codes_are_those_of_the_library_and_consecutive():
    assert [DraftSource(source).name for source in Source] == [source.name for source in Source]
    *known, other = DraftSource
    assert [int(source) for source in known] == list(range(len(known)))
    assert other > max(known)
    assert SOURCE_NAMES[:5] == ("corpus", "local", "fallback", "library", "draft-model")
    assert SOURCE_NAMES[-1] == "other"


def test_kinds_that_draft_neither_from_the_corpus_nor_from_the_own_text_have_a_source_of_their_name():
    assert KINDS.keys() - {"none", "ngram", "ssd", "ssd-remote", "classic"} <= set(SOURCE_NAMES)


def test_tokens_are_counted_by_source_and_unknown_codes_as_other():
    codes = np.random.default_rng(1).integers(0, 256, 500).astype(np.uint8)
    expected = [0] * len(SOURCE_NAMES)
    for code in codes.tolist():
        expected[code if code < DraftSource.GRAMMAR + 1 else -1] += 1
    assert count_sources(codes).tolist() == expected
    assert count_sources(codes[:0]).tolist() == [0] * len(SOURCE_NAMES)


def test_counts_have_the_names_of_sources_that_occurred():
    drafted, accepted = (
        count_sources(np.array(codes, np.uint8))
        for codes in ([DraftSource.MTP] * 5 + [255, 255, 99] + [0] * 3, [255, 0, 255])
    )
    assert counts_by_name(drafted, accepted) == {"corpus": (3, 1), "mtp": (5, 0), "other": (3, 2)}
    assert list(counts_by_name(drafted, accepted)) == ["corpus", "mtp", "other"]
    assert counts_by_name(*np.zeros((2, len(SOURCE_NAMES)), np.int64)) == {}


def test_counts_of_several_outputs_are_added():
    first, second = {"mtp": DraftCounts(4, 3)}, {"corpus": DraftCounts(2, 0), "mtp": DraftCounts(1, 1)}
    assert sum_by_name([first, {}, second]) == {"corpus": (2, 0), "mtp": (5, 4)}
    assert sum_by_name([]) == {}
