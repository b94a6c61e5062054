"""Folders of results."""

import pytest

from drafter_service.observability.measuring.results import prepare
from ssd.errors import UserError


def test_checking_files_leaves_none_and_changes_none(tmp_path):
    (tmp_path / "old").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    prepare(tmp_path, ("old", "new", "link"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old"]
    assert (tmp_path / "old").read_text() == "text"


def test_an_unusable_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(UserError, match=r"cannot write to .*; give another folder with --out"):
            prepare(out, ("a",))
