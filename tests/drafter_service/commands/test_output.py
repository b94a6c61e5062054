"""Files that commands write are checked before the work and written after it."""

import os

import pytest

from drafter_service.commands.output import OWNER_ONLY, check_writable, write
from ssd.errors import UserError


def test_a_check_changes_nothing(tmp_path):
    new, old, link = (tmp_path / name for name in ("new", "old", "link"))
    old.write_text("contents")
    link.symlink_to(new)
    for path in (new, old, link):
        check_writable(path)
    assert old.read_text() == "contents"
    assert sorted(os.listdir(tmp_path)) == ["link", "old"]


def test_a_written_file_is_named(tmp_path, capsys):
    write(tmp_path / "page", "contents")
    assert (tmp_path / "page").read_text() == "contents"
    assert capsys.readouterr().err == f"wrote {tmp_path / 'page'}\n"


def test_a_page_is_readable_by_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        write(tmp_path / "page", "contents", OWNER_ONLY)
        write(tmp_path / "settings", "contents")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("page", "settings")] == [0o600, 0o666]


@pytest.mark.parametrize("fail", [check_writable, lambda path: write(path, "")])
def test_a_file_that_cannot_be_written_is_refused(tmp_path, fail):
    with pytest.raises(UserError, match=r"cannot write .*page: No such file or directory; give another file"):
        fail(tmp_path / "absent" / "page")
