"""Files of results are checked before the work and written after it."""

import os

import pytest

from drafter_service.observability.measuring.results import OWNER_ONLY, check_writable, prepare, write
from ssd.errors import UserError


def test_checking_files_leaves_none_and_changes_none(tmp_path):
    (tmp_path / "old").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    prepare(tmp_path, ("old", "new", "link"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old"]
    assert (tmp_path / "old").read_text() == "text"


def test_a_page_is_readable_by_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        write(tmp_path / "page", "contents", OWNER_ONLY)
        write(tmp_path / "settings", "contents")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("page", "settings")] == [0o600, 0o666]


@pytest.mark.parametrize("fail", [check_writable, lambda path: write(path, ""), lambda path: prepare(path, ("a",))])
def test_a_place_that_cannot_be_written_is_refused(tmp_path, fail):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*page.*: Not a directory; give another place"):
        fail(tmp_path / "file" / "page")
