"""Counts of accepted passages."""

import numpy as np
import pytest

from drafter_service.observability import passages
from drafter_service.observability.passages import MAX_COUNTED, MAX_LENGTH, MIN_LENGTH, Passages
from ssd.corpus.corpus import Corpus


@pytest.fixture
def texts():
    random = np.random.default_rng(0)
    return [random.integers(0, 1000, 100).astype(np.uint32) for _ in range(20)]


@pytest.fixture
def corpus(texts):
    corpus = Corpus(10_000, 32)
    for number, text in enumerate(texts):
        corpus.append(text, f"request-{number}")
    corpus.refresh()
    return corpus


def test_most_accepted_passage_comes_first_with_its_age(texts, corpus):
    found = Passages()
    for number, times in ((3, 2), (7, 5), (9, 1)):
        for _ in range(times):
            found.record(texts[number][10:50], corpus)
    first, second, third = found.most_productive(corpus)
    assert [first.accepted, second.accepted, third.accepted] == [200, 80, 40]
    assert first.tokens == texts[7][10 : 10 + MAX_LENGTH].tolist()
    # The rest of its text and 12 other texts follow, each with a separator.
    assert first.age_tokens == 100 - 42 + 1 + 12 * 101


def test_short_pieces_and_unknown_text_are_not_counted(texts, corpus):
    found = Passages()
    found.record(texts[0][: MIN_LENGTH - 1], corpus)
    found.record(np.arange(5000, 5040, dtype=np.uint32), corpus)
    assert found.most_productive(corpus) == []
    found.record(texts[0][:MIN_LENGTH], corpus)
    assert len(found.most_productive(corpus)) == 1


def test_forgotten_text_is_not_shown(texts, corpus):
    found = Passages()
    for number in (3, 7):
        found.record(texts[number][10:50], corpus)
    corpus.forget("request-3")
    corpus.refresh()
    assert [passage.tokens for passage in found.most_productive(corpus)] == [texts[7][10:42].tolist()]
    assert len(found._accepted) == 1


def test_memory_is_bounded_and_frequent_passages_remain(texts, corpus, monkeypatch):
    monkeypatch.setattr(passages, "MAX_COUNTED", 16)
    found = Passages()
    for _ in range(10):
        found.record(texts[0][:40], corpus)
    for text in texts:
        for first in range(1, 50):
            found.record(text[first : first + 12], corpus)
            assert len(found._accepted) <= 16 < MAX_COUNTED
    assert found.most_productive(corpus)[0].tokens == texts[0][:32].tolist()
