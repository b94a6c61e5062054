import threading
import time

import numpy as np
import pytest

from ssd.corpus import Corpus
from ssd.order import full_order
from tests import naive
from tests.strategies import array


def assert_whole(view):
    """A view that was read while others were built must be the order of its own text."""
    assert view.order.tolist() == naive.full_order(view.text.tolist())


def test_requests_are_in_the_view_after_a_refresh():
    corpus = Corpus(100, full_order)
    corpus.append(array([1, 2, 3]))
    assert len(corpus.view.text) == 0
    assert corpus.is_stale
    corpus.refresh()
    assert corpus.view.text.tolist() == [1, 2, 3, naive.SEPARATOR]
    assert not corpus.is_stale
    assert_whole(corpus.view)


def test_an_old_view_stays_as_it_was_while_the_ring_wraps():
    corpus = Corpus(16, full_order)
    corpus.append(array([1, 2, 3, 4, 5]))
    corpus.refresh()
    old = corpus.view
    for start in range(10):
        corpus.append(array([start, start + 1, start]))
        corpus.refresh()
        assert_whole(corpus.view)
    assert old.text.tolist() == [1, 2, 3, 4, 5, naive.SEPARATOR]


def test_views_cannot_be_written_to():
    corpus = Corpus(16, full_order)
    with pytest.raises(ValueError, match="read-only"):
        corpus.view.text.fill(0)


def test_a_refresh_without_news_keeps_the_view():
    corpus = Corpus(16, full_order)
    corpus.append(array([1]))
    corpus.refresh()
    view = corpus.view
    corpus.refresh()
    assert corpus.view is view


def test_the_maintainer_publishes_in_the_background():
    published = threading.Event()

    def sort(text):
        if len(text):
            published.set()
        return full_order(text)

    corpus = Corpus(100, sort)
    corpus.append(array([1, 2]))
    corpus.maintain(0.001)
    assert published.wait(10)
    corpus.close()  # waits for the build that was under way
    assert corpus.view.text.tolist() == [1, 2, naive.SEPARATOR]


def test_readers_race_the_maintainer():
    corpus = Corpus(64, full_order)
    corpus.maintain(0.0001)
    rng = np.random.default_rng(0)
    views, until = set(), time.monotonic() + 60
    while len(views) < 20:
        corpus.append(rng.integers(0, 4, rng.integers(1, 20)).astype(np.uint32))
        assert_whole(corpus.view)
        views.add(corpus.view)
        assert time.monotonic() < until
    corpus.close()


def test_the_maintainer_outlives_a_build_that_fails(caplog):
    failed, published = threading.Event(), threading.Event()

    def sort(text):
        if len(text) and not failed.is_set():
            failed.set()
            raise MemoryError
        if len(text):
            published.set()
        return full_order(text)

    corpus = Corpus(100, sort)
    corpus.append(array([1, 2, 3]))
    corpus.maintain(0.001)
    assert published.wait(30)
    corpus.close()
    assert failed.is_set()
    assert "drafts come from the last one" in caplog.text
