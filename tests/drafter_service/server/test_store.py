"""Namespaces on disk: descriptions, names, and atomic replacement of files."""

import errno
import os
import re
from pathlib import Path

import pytest

from drafter_service.observability.facts import ModelIdentity, Sample
from drafter_service.observability.report.schema import ClientTotals
from drafter_service.server.naming import KnownNamespace
from drafter_service.server.store import DESCRIPTION, NAME, Description, Store
from ssd.errors import UserError
from tests.drafter_service.server.opened_namespaces import raising

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
        "forgotten": {-(1 << 63): 1.5, 7: 2.5},
        "forgotten_before": 3.5,
    }
    return Description(name=name, **(parts | changes))


def written(store, name="a", **changes):
    store.make_folder(name)
    store.write_description(description(name, **changes))
    return store


def read(store, name="a"):
    """Return the description of a namespace."""
    return store.read(name, 100_000, 8).description


def files_of(store, name="a"):
    return sorted(path.name for path in (store.folder / name).iterdir())


def test_a_description_is_read_back(store):
    assert read(written(store)) == description()
    assert read(store).samples() == [SAMPLE]
    assert read(store, "b") is None
    # Fields that a description lacks have defaults.
    store.make_folder("c")
    (store.folder / "c" / DESCRIPTION).write_text('{"name": "c", "model": {}, "history": [[1, 2]]}')
    kept = read(store, "c")
    assert (kept.clients, kept.log_position, kept.samples(), kept.forgotten) == (ClientTotals(), None, [], {})
    assert store.known == {"a": KnownNamespace(description().model, description().tokens, description().log_position)}


DAMAGED = ("[]", '{"a": 1}', '{"1": null}', '{"1": NaN}', '{"1": 1e999}', '{"1.5": 1}')
"""Values of the field `forgotten`."""


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", '{"name": 5}', '{"name": "a", "model": {"vocab_size": "x"}}'),
        *(f'{{"name": "a", "model": {{}}, "forgotten": {value}}}' for value in DAMAGED),
    ],
)
def test_a_damaged_description_is_set_aside(store, content):
    store.make_folder("a")
    (store.folder / "a" / DESCRIPTION).write_text(content)
    store.names()
    assert store.known["a"] == KnownNamespace()
    assert files_of(store) == [DESCRIPTION]
    assert read(store) is None
    assert (store.folder / "a" / "namespace.refused").read_text() == content
    assert store.set_aside == {"a": ["namespace.refused"]}


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


def test_no_file_that_was_set_aside_replaces_another(store):
    written(store)
    for content in ("first", "second", "third"):
        store.corpus_path("a").write_text(content)
        assert store.read("a", 100_000, 8).loaded is None
    names = ["corpus.refused", "corpus.refused.2", "corpus.refused.3"]
    assert [(store.folder / "a" / name).read_text() for name in names] == ["first", "second", "third"]
    # Another process finds them, too, even without other files.
    (store.folder / "a" / DESCRIPTION).unlink()
    again = Store(store.folder)
    assert again.set_aside == store.set_aside == {"a": names}
    assert (again.names(), again.has("a")) == (["a"], True)
    assert again.remove_set_aside("a") == names
    assert (again.set_aside, again.remove_set_aside("a"), files_of(store)) == ({}, [], [])
    # All files of a namespace are deleted.
    store.corpus_path("a").write_text("damaged")
    for _ in range(2):
        store.delete("a")
        assert (store.set_aside, store.known, store.names()) == ({}, {}, [])
    assert not (store.folder / "a").exists()


def test_a_damaged_file_that_cannot_be_renamed_stays(store, monkeypatch):
    written(store).corpus_path("a").write_text("damaged")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", raising(OSError(errno.EROFS, "Read-only file system")))
        with pytest.raises(OSError, match="Read-only"):
            store.read("a", 100_000, 8)
    assert (files_of(store), store.set_aside) == (["corpus.ssd", DESCRIPTION], {})


def test_a_file_is_absent_only_if_the_file_system_says_so(store, monkeypatch):
    written(store)
    for code in (errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", raising(OSError(code, os.strerror(code))))
            patch.setattr(os, "listdir", raising(OSError(code, os.strerror(code))))
            for look in (lambda: store.has("a"), lambda: store.read("a", 100_000, 8), store.names):
                with pytest.raises(OSError, match=re.escape(os.strerror(code))):
                    look()
    assert store.has("a")


def test_a_folder_that_is_gone_is_an_error_and_not_an_empty_one(store):
    """The mount point of a disk that was unmounted is an empty folder."""
    written(store)
    with store.exclusive_use():
        assert not store.has("b")
        gone = store.folder.rename(store.folder.with_name("gone"))
        store.folder.mkdir()
        for use in (
            lambda: store.has("a"),
            lambda: store.read("a", 100_000, 8),
            store.names,
            lambda: store.make_folder("a"),
            lambda: store.write_description(description()),
            lambda: store.delete("a"),
        ):
            with pytest.raises(OSError, match="gone or another file"):
                use()
        assert not any(store.folder.iterdir())
        (store.folder / ".lock").touch()
        with pytest.raises(OSError, match="gone or another file"):
            store.make_folder("a")
        (store.folder / ".lock").unlink()
        store.folder.rmdir()
        gone.rename(store.folder)
        assert store.has("a")


def test_a_path_that_is_not_a_file_is_an_error_and_stays(store):
    store.make_folder("a")
    os.mkfifo(store.corpus_path("a"))
    for look in (lambda: store.has("a"), lambda: store.read("a", 100_000, 8)):
        with pytest.raises(OSError, match="is not a file"):
            look()
    assert store.corpus_path("a").is_fifo()


def test_a_failed_write_keeps_the_old_description(store, monkeypatch):
    written(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raising(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            store.write_description(description(duplicates=50))
    assert read(store).duplicates == 3
    assert os.listdir(store.folder / "a") == [DESCRIPTION]


def test_files_are_readable_by_their_owner_only_and_replace_what_a_killed_write_has_left(store):
    written(store)
    paths = (store.folder, store.folder / "a", store.folder / "a" / DESCRIPTION)
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o700, 0o700, 0o600]
    (store.folder / "a" / f".{DESCRIPTION}.part").write_text("half")
    assert read(written(store)) == description()
    assert files_of(store) == [DESCRIPTION]


def test_an_unusable_folder_is_an_error_that_names_the_setting(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=f"snapshots.folder: cannot write to {folder}"):
            Store(folder)


def test_names_are_those_of_folders():
    for name in ("a", "Llama-3.1-8B", "team_a@eu", "_", "0", "a" * 128, "a..b"):
        assert NAME.fullmatch(name)
    invalid = ["", ".", "..", "../x", "a/b", "/a", "a\\b", ".a", "-a", "a b", "a\n", "a\0", "é", "a" * 129, "a:b", "~"]
    assert not any(map(NAME.fullmatch, invalid))
