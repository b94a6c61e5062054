"""Namespaces on disk: descriptions, names, and atomic replacement of files."""

import os

import pytest

from drafter_service.observability.facts import ModelIdentity, Sample
from drafter_service.observability.report.schema import ClientTotals
from drafter_service.server.store import DESCRIPTION, NAME, Description, Store
from ssd.errors import UserError

SAMPLE = Sample(1.5, 1, 2, 3, 4, 5, 6, 7, 8, 9)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "folder")


def description(name="a", **changes):
    parts = {
        "model": ModelIdentity("llama", "t", "lora", 99),
        "clients": ClientTotals(timeouts=7),
        "duplicates": 3,
        "log_position": "1-2",
        "history": [tuple(SAMPLE)],
    }
    return Description(name=name, **(parts | changes))


def written(store, name="a", **changes):
    store.make_folder(name)
    store.write_description(description(name, **changes))
    return store


def test_a_description_is_read_back(store):
    assert written(store).describe("a") == description()
    assert store.describe("a").samples() == [SAMPLE]
    assert store.describe("b") is None


def test_fields_that_a_description_lacks_have_defaults(store):
    store.make_folder("a")
    (store.folder / "a" / DESCRIPTION).write_text('{"name": "a", "model": {}, "history": [[1, 2]]}')
    kept = store.describe("a")
    assert (kept.clients, kept.log_position, kept.samples()) == (ClientTotals(), None, [])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"name": 5}', '{"name": "a", "model": {"vocab_size": "x"}}'])
def test_an_unreadable_description_counts_as_missing(store, content):
    store.make_folder("a")
    (store.folder / "a" / DESCRIPTION).write_text(content)
    assert store.describe("a") is None


def test_a_namespace_exists_with_either_file(store):
    """A process that is killed between writing the two files leaves only one."""
    assert store.names() == []
    written(store, "b")
    store.make_folder("a")
    store.corpus_path("a").touch()
    store.make_folder("empty")
    (store.folder / "stray").touch()
    assert store.names() == ["a", "b"]
    assert [store.has(name) for name in ("a", "b", "empty", "stray", "c")] == [True, True, False, False, False]


def test_all_files_of_a_namespace_are_deleted(store):
    written(store).corpus_path("a").touch()
    store.move_refused("a")
    store.delete("a")
    assert not (store.folder / "a").exists()
    store.delete("a")


def test_a_refused_corpus_is_renamed(store):
    written(store).corpus_path("a").write_text("damaged")
    refused = store.move_refused("a")
    assert refused.read_text() == "damaged"
    assert not store.corpus_path("a").exists()
    # The next refused corpus replaces it, so that damaged files do not fill the disk.
    store.corpus_path("a").write_text("again")
    assert store.move_refused("a") == refused
    store.remove_refused("a")
    store.remove_refused("a")
    assert not refused.exists()


def test_a_failed_write_keeps_the_old_description(store, monkeypatch):
    written(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            store.write_description(description(duplicates=50))
    assert store.describe("a").duplicates == 3
    assert os.listdir(store.folder / "a") == [DESCRIPTION]


def test_files_are_readable_by_their_owner_only(store):
    written(store)
    for path in (store.folder, store.folder / "a"):
        assert path.stat().st_mode & 0o777 == 0o700
    assert (store.folder / "a" / DESCRIPTION).stat().st_mode & 0o777 == 0o600


def test_an_unusable_folder_is_an_error_that_names_the_setting(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=f"snapshots.folder: cannot write to {folder}"):
            Store(folder)


@pytest.mark.parametrize("name", ["a", "Llama-3.1-8B", "team_a@eu", "_", "0", "a" * 128, "a..b"])
def test_valid_names(name):
    assert NAME.fullmatch(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/a", "a\\b", ".a", "-a", "a b", "a\n", "a\0", "é", "a" * 129, "a:b", "~"]
)
def test_invalid_names(name):
    assert not NAME.fullmatch(name)
