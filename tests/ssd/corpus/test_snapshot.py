"""Snapshots: restored contents, refused files, and replacement of files."""

import os
import struct
import tempfile
import threading
import time
import zlib

import numpy as np
import pytest

import ssd.kernels.probabilities
from ssd import DrafterConfig, SuffixDrafter
from ssd.corpus import sections, snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.sections import BLOCK, DamagedError, Section, SnapshotError, read_sections, write_sections
from ssd.corpus.snapshot import load, save
from ssd.errors import UserError
from ssd.stats import Stats
from tests.replay import replay_one
from tests.ssd.corpora import DEPTH, assert_whole, drafts_of, fill, settle, some_requests, text_of

CAPACITY = 100_000
CONFIG = DrafterConfig(match_depth=DEPTH)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "corpus.snapshot"


def built(requests, capacity=CAPACITY):
    corpus = Corpus(capacity, DEPTH)
    for request in requests:
        corpus.append(request)
    corpus.refresh()
    settle(corpus)
    return corpus


def drafts(corpus, requests):
    return drafts_of(SuffixDrafter(CONFIG, corpus=corpus), requests)


def assert_same_drafts(one, other, requests):
    # Drafting trains the learned tables, so both must start with equal ones.
    found = drafts(one, requests)
    assert found == drafts(other, requests)
    assert sum(len(draft[0]) for draft in found) > 100


@pytest.mark.parametrize("count", [300, 2500])
def test_a_loaded_corpus_drafts_the_same(path, count):
    """Many positions match, so drafts are equal only if the suffix arrays are. After 2500 requests the ring wraps."""
    requests = some_requests(count)
    corpus = Corpus(CAPACITY, DEPTH)
    for first in range(0, count, 700):
        for request in requests[first : first + 700]:
            corpus.append(request)
        corpus.refresh()
    drafter = SuffixDrafter(CONFIG, corpus=corpus)
    for number, request in enumerate(requests[-30:]):
        replay_one(drafter, number, request[:20], request[20:], learn=False)
    size = save(corpus, path, drafter.stats)
    assert size == path.stat().st_size
    loaded, stats, notes = load(path, CAPACITY, DEPTH)
    assert notes == []
    assert all(np.array_equal(a, b) for a, b in zip(stats.counters, drafter.stats.counters, strict=True))
    assert np.array_equal(text_of(loaded), text_of(corpus))
    assert loaded.requests >= loaded.tokens // 101
    assert_whole(loaded)
    assert_same_drafts(corpus, loaded, requests[-100:])


def test_another_match_depth_is_refused(path):
    save(built(some_requests(10)), path)
    with pytest.raises(SnapshotError, match=f"match depth of {DEPTH}, not 9"):
        load(path, CAPACITY, 9)


def refuse(path, error=DamagedError, word=""):
    with pytest.raises(SnapshotError, match=rf"corpus\.snapshot: .*{word}") as refused:
        load(path, CAPACITY, DEPTH)
    assert type(refused.value) is error


def damaged_files(whole):
    """Yield a snapshot that was cut anywhere, is too long, has a flipped bit, and contents of other formats."""
    rng = np.random.default_rng(0)
    places = rng.integers(BLOCK, len(whole), 20).tolist()
    for size in [*range(40), *range(40, BLOCK, 99), BLOCK - 1, BLOCK, *places, len(whole) - 1]:
        yield whole[:size]
    yield whole + b"\0"
    for place in [*range(0, BLOCK, 31), *rng.integers(0, len(whole), 40).tolist()]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(rng.integers(8))
        yield flipped
    yield from (b"{}\n", b"SSDSNAP\n", b"\0" * 100_000, rng.bytes(20_000))


def test_damaged_files_are_refused(path):
    save(built(some_requests(20)), path)
    whole = path.read_bytes()
    for content in damaged_files(whole):
        path.write_bytes(content)
        refuse(path)
    path.write_bytes(whole)
    assert load(path, CAPACITY, DEPTH).corpus.tokens == 2020


def test_missing_files_and_folders_are_refused(path):
    refuse(path, SnapshotError)
    path.mkdir()
    refuse(path, SnapshotError)
    assert issubclass(SnapshotError, UserError)


def with_version(data):
    struct.pack_into("<I", data, 8, 2)


def with_a_name_that_is_not_text(data):
    data[data.index(b"facts")] = 0xFF
    struct.pack_into("<I", data, BLOCK - 4, zlib.crc32(data[: BLOCK - 4]))


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        (with_version, SnapshotError, "format 2, this version reads 1"),
        (with_a_name_that_is_not_text, DamagedError, "its header is damaged"),
    ],
)
def test_changed_headers_are_refused(path, change, error, word):
    save(built(some_requests(20)), path)
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    refuse(path, error, word)


def rewrite(path, **changed):
    """Write a snapshot again with some sections changed; a section that is None is left out."""
    arrays = {name: np.array(array) for name, array in read_sections(path).items()} | changed
    write_sections(
        path, [Section(name, array.dtype.str, [array]) for name, array in arrays.items() if array is not None]
    )


IMPOSSIBLE = {
    "facts": [(0, 0), (0, 65), (4, 4095), (4, 1 << 32), (1, 20201), (2, 20201), (2, -1), (2, 500)],
    "order": [(7, 20200), (7, 0), (-1, 0xFFFF_FFFF)],
    "text": [(-1, 5)],
    "requests.first": [(1, 0), (3, 0), (-1, 20200), (0, -1)],
    "requests.time": [(0, np.nan)],
    "odds.cells": [(0, np.nan), (2, 8.0), (1, np.inf), (1, -1.0)],
    "odds.logits": [(0, 100.0)],
    "odds.weights": [(0, np.nan)],
}
"""Elements of sections: index and value."""


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_contents_are_refused(path, name):
    save(built(some_requests(200)), path)
    load(path, CAPACITY, DEPTH)
    sound = read_sections(path)[name]
    for at, value in IMPOSSIBLE[name]:
        section = sound.copy()
        section[at] = value
        rewrite(path, **{name: section})
        with pytest.raises(DamagedError, match="was not written by a drafter"):
            load(path, CAPACITY, DEPTH)


def test_text_and_counters_are_loaded_without_tables_of_another_layout(path, monkeypatch, caplog):
    """Another version may have other tables, and tables of other sizes."""
    corpus, stats = built(some_requests(200)), Stats()
    stats.record_path(committed=3, verified=2, accepted=1)
    save(corpus, path, stats)
    other = np.full(7, np.nan, np.float32)
    rewrite(path, **{"odds.cells": other, "odds.logits": None, "odds.biases": other})
    with monkeypatch.context() as patch:
        patch.setattr(ssd.kernels.probabilities, "SHARE_BUCKETS", 12)
        loaded = load(path, CAPACITY, DEPTH)
    assert len(loaded.notes) == 1
    assert "learning starts again" in loaded.notes[0]
    assert "learning starts again" in caplog.text
    assert (loaded.stats.steps, loaded.stats.accepted) == (1, 1)
    assert_whole(loaded.corpus)
    fresh = Corpus(CAPACITY, DEPTH).learned
    assert all(np.array_equal(*pair) for pair in zip(loaded.corpus.learned, fresh, strict=True))
    assert_same_drafts(corpus, loaded.corpus, some_requests(200)[-50:])


@pytest.mark.parametrize(
    "saved", [None, np.zeros(3, np.int64), np.zeros(80, np.float64)], ids=["none", "size", "dtype"]
)
def test_counters_of_another_version_start_again(path, saved):
    corpus, stats = built(some_requests(20)), Stats()
    stats.record_path(committed=3, verified=2, accepted=1)
    save(corpus, path, stats)
    rewrite(path, **{"stats.by_age": saved})
    loaded = load(path, CAPACITY, DEPTH)
    assert "counting starts again" in loaded.notes[0]
    assert loaded.stats.steps == 0


@pytest.mark.parametrize("short", [0, 100], ids=["before the header", "in a section"])
def test_a_file_that_becomes_shorter_while_it_is_read_is_not_called_damaged(path, monkeypatch, short):
    """This happens on network folders; the contents that were read do not prove damage."""
    save(built(some_requests(20)), path)
    real = os.fstat

    def shorten(descriptor):
        found = real(descriptor)
        os.truncate(path, BLOCK + short if short else 0)
        return found

    monkeypatch.setattr(sections.os, "fstat", shorten)
    refuse(path, SnapshotError)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file_unchanged(path, monkeypatch, step):
    """A killed process leaves it too, since the new file has its name only once it is complete on the disk."""
    corpus = built(some_requests(20))
    save(corpus, path)
    whole = path.read_bytes()
    fill(corpus, some_requests(20, seed=1))
    with monkeypatch.context() as patch:

        def fail(*_):
            raise OSError(28, "No space left on device")

        patch.setattr(os, step, fail)
        with pytest.raises(SnapshotError, match="No space left on device") as kept:
            save(corpus, path)
    # A reference to the error does not delay changes.
    corpus.forget_older_than(-1)
    corpus.refresh()
    assert "corpus.snapshot" in str(kept.value)
    fill(corpus, some_requests(40, seed=1))
    assert path.read_bytes() == whole
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    save(corpus, path)
    assert load(path, CAPACITY, DEPTH).corpus.requests == 40


def test_unfinished_files_of_killed_processes_are_removed(path):
    left = path.with_name(f".{path.name}.abc.part")
    left.write_bytes(b"half")
    save(built(some_requests(2)), path)
    assert not left.exists()


@pytest.mark.parametrize("when", [(tempfile, "mkstemp"), (os, "replace")], ids=["begun", "written"])
def test_a_file_that_another_process_writes_is_not_removed(path, monkeypatch, when):
    """Another save of the same file looks for leftovers just before a part is locked, or just before it is renamed."""
    step, looked = getattr(*when), []

    def look_around(*given, **named):
        is_first = not looked
        looked.append(when)
        made = step(*given, **named) if when[1] == "mkstemp" else None
        if is_first:
            sections._remove_leftovers(path)
        return made or step(*given, **named)

    monkeypatch.setattr(*when, look_around)
    save(built(some_requests(5)), path)
    assert load(path, CAPACITY, DEPTH).corpus.requests == 5
    assert len(looked) == (2 if when[1] == "mkstemp" else 1)
    assert [left.name for left in path.parent.iterdir()] == [path.name]


def test_the_error_names_a_missing_folder(path):
    with pytest.raises(SnapshotError, match="cannot be written: No such file"):
        save(built([]), path.parent / "nowhere" / "corpus.snapshot")


def stalled(monkeypatch, section):
    """Stall a save where it begins to write a section, until the returned event is set; the other one says that it has
    reached it.
    """
    reached, go_on, write = threading.Event(), threading.Event(), sections._write_section

    def write_or_stall(file, given):
        if given.name == section:
            reached.set()
            assert go_on.wait(60)
        return write(file, given)

    monkeypatch.setattr(sections, "_write_section", write_or_stall)
    return reached, go_on


@pytest.mark.parametrize("section", ["text", "order", "odds.cells"])
@pytest.mark.parametrize("forgets", [False, True])
def test_nothing_waits_for_a_save_that_stalls(path, monkeypatch, section, forgets):
    secret = np.arange(5000, 5100, dtype=np.uint32)
    corpus, problems = Corpus(20_000, DEPTH), []
    fill(corpus, [*some_requests(200), secret], "mine")
    settle(corpus)
    reached, go_on = stalled(monkeypatch, section)

    def save_it():
        try:
            save(corpus, path)
        except Exception as problem:
            problems.append(problem)

    saving = threading.Thread(target=save_it, daemon=True)
    saving.start()
    assert reached.wait(60)
    corpus.maintain(0.0005)
    # Enough to wrap around the ring several times.
    for number in range(40):
        for request in some_requests(10, seed=number, size=1000):
            corpus.append(request)
        while corpus.waiting:
            time.sleep(0.0005)
    if forgets:
        corpus.forget("mine")
        corpus.forget_older_than(-1)
    corpus.refresh()
    assert corpus.state().head > 400_000
    corpus.close()
    assert not path.exists()
    go_on.set()
    saving.join(60)
    assert not problems
    assert not saving.is_alive()
    loaded = load(path, 20_000, DEPTH).corpus
    assert_whole(loaded)
    has_newest = forgets or section == "text"
    assert (secret.tobytes() in path.read_bytes()) is not has_newest
    assert np.array_equal(text_of(loaded), text_of(corpus)[-loaded.tokens :]) is has_newest


def forgetting(corpus, monkeypatch, times):
    """Forget text whenever a snapshot is about to replace a file, this number of times."""
    fsync, left = os.fsync, list(range(times))

    def forget(descriptor):
        if left:
            left.pop()
            fill(corpus, some_requests(1), "mine")
            corpus.forget("mine")
            corpus.refresh()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", forget)


def test_a_save_whose_text_is_always_replaced_gives_up(path, monkeypatch):
    monkeypatch.setattr(snapshot, "ATTEMPTS_S", 0.0)
    corpus = built(some_requests(20))
    forgetting(corpus, monkeypatch, 100)
    with pytest.raises(SnapshotError, match="its text was replaced meanwhile, 3 times; try again"):
        save(corpus, path)
    assert list(path.parent.iterdir()) == []


def test_a_save_is_repeated_while_text_is_forgotten(path, monkeypatch):
    monkeypatch.setattr(snapshot, "ATTEMPTS_S", 600.0)
    corpus = built(some_requests(20))
    forgetting(corpus, monkeypatch, 40)
    save(corpus, path)
    assert np.array_equal(text_of(load(path).corpus), text_of(corpus))


def test_a_file_is_private_and_its_sections_are_read_only(path):
    corpus = built(some_requests(200))
    save(corpus, path)
    assert path.stat().st_mode & 0o077 == 0
    sections = read_sections(path)
    assert not sections["order"].flags.writeable
    assert sections["text"].tolist() == text_of(corpus).tolist()
