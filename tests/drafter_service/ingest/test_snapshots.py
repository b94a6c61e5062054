"""Snapshots as sources: names, times, tags and long requests survive, and copies of remote ones have no name."""

import tempfile

import fsspec
import numpy as np
import pytest

from drafter_service.ingest import pipeline, token_files
from drafter_service.ingest.files import list_files
from drafter_service.ingest.reading import Reading
from drafter_service.ingest.sinks import OfflineSink
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.requests import hash_of
from ssd.corpus.sections import read_sections
from tests.drafter_service.ingest.loads import documents_in
from tests.strategies import array

CAPACITY = 20_000


def saved(path, *requests):
    """Save a corpus of requests, each the arguments of `Corpus.append` after a text."""
    corpus = Corpus(CAPACITY, 32)
    for text, name, tag, time in requests:
        corpus.append(array(text), name, tag, time=time)
    snapshot.save(corpus, path)
    return path


def warmed(source, target):
    """Learn a snapshot into another one; return the corpus of that one, and the totals."""
    learned = pipeline.load(list_files([str(source)]), Reading(), OfflineSink(target, CAPACITY), lambda *_: None)
    return snapshot.load(target).corpus, learned


def test_names_times_and_tags_survive(tmp_path):
    requests = [([1, 2], "one", 7, 100.0), ([3, 4, 5], None, 0, 200.0), ([6], "three", 0, 300.0)]
    source = saved(tmp_path / "a.ssd", *requests)
    for number in range(2):  # From the original, and from a snapshot of a snapshot.
        source, (corpus, learned) = tmp_path / f"{number}.ssd", warmed(source, tmp_path / f"{number}.ssd")
        assert learned == (3, 6, 0)
        assert corpus.text_of("one").tolist() == [1, 2]
        assert corpus.request_times()[hash_of("one")] == 100
        rows = corpus.state().rows
        assert (rows["tag"].tolist(), rows["time"].tolist()) == ([7, 0, 0], [100, 200, 300])
    _, learned = warmed(tmp_path / "a.ssd", tmp_path / "0.ssd")
    assert learned.duplicates == 3
    command = corpus.forget("one")
    corpus.forget_older_than(corpus.clock() - 250)
    corpus.refresh()
    assert command.requests == 1
    assert [corpus.text_of(name).tolist() for name in ("one", "three")] == [[], [6]]
    snapshot.save(corpus, source)
    assert list(documents_in(source)[0].values()) == [[6]]


def test_a_time_to_come_is_taken_for_now(tmp_path):
    corpus, _ = warmed(saved(tmp_path / "a.ssd", ([1], "one", 0, 1e18)), tmp_path / "b.ssd")
    assert corpus.request_times()[hash_of("one")] <= corpus.clock()


@pytest.mark.parametrize("name", ["long", None])
def test_the_pieces_of_a_long_request_are_one_document(tmp_path, name):
    """The corpus divides a text that fills a quarter of its room for new text, and repeats tokens at the cuts."""
    first, long = np.arange(160_000, dtype=np.uint32) % 991, np.arange(36_000, dtype=np.uint32) % 977
    corpus = Corpus(400_000, 32)
    for text, each in ((first, "before"), (long, name), ([3], "after")):
        corpus.append(array(text), each)
        corpus.refresh()
    assert corpus.requests == 5
    snapshot.save(corpus, tmp_path / "a.ssd")
    documents, _ = documents_in(tmp_path / "a.ssd")
    assert list(documents.values()) == [first.tolist(), long.tolist(), [3]]


def test_requests_without_names_are_not_joined(tmp_path):
    source = saved(tmp_path / "a.ssd", ([1, 2], None, 0, 100.0), ([3, 4], None, 0, 100.0))
    assert list(documents_in(source)[0].values()) == [[1, 2], [3, 4]]


def test_the_copy_of_a_remote_snapshot_has_no_name(tmp_path, monkeypatch):
    fsspec.filesystem("memory").pipe("/remote.ssd", saved(tmp_path / "a.ssd", ([1, 2], "one", 0, 1.0)).read_bytes())
    folder, listed = tmp_path / "temporary", []
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    def read_and_list(path):
        listed.extend([*folder.iterdir(), path.exists()])
        return read_sections(path)

    monkeypatch.setattr(token_files, "read_sections", read_and_list)
    documents, _ = documents_in("memory://remote.ssd")
    assert list(documents.values()) == [[1, 2]]
    assert listed == [True]
