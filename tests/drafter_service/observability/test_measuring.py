"""Alternated rounds and figures over them, files of results, and the version that made them."""

import os
from importlib.metadata import PackageNotFoundError

import pytest

from drafter_service.observability import process
from drafter_service.observability.measuring import rounds
from drafter_service.observability.measuring.results import OWNER_ONLY, check_writable, prepare, write
from drafter_service.observability.measuring.rounds import Timer, alternated, columns, median_of, median_ratio
from ssd.errors import UserError


def test_every_case_runs_every_item_and_rounds_begin_with_another_case():
    order = []
    cases = {name: (lambda item, name=name: order.append((item, name)) or f"{name}{item}") for name in "abc"}
    found = list(alternated(cases, range(4)))
    assert "".join(name for _, name in order) == "abc" + "bca" + "cab" + "abc"
    assert [item for item, _ in order] == [number for number in range(4) for _ in cases]
    assert [list(each) for each in found] == [["a", "b", "c"]] * 4
    assert columns(found) == {name: [f"{name}{item}" for item in range(4)] for name in "abc"}


def test_ratios_are_taken_within_a_round():
    slow, fast = [2.0, 4.0, 8.0], [1.0, 1.0, 8.0]
    assert median_of(slow, float) == 4.0
    assert median_ratio(slow, fast, float) == 2.0  # of 2, 4 and 1
    with pytest.raises(ValueError, match="zip"):
        median_ratio(slow, fast[:2], float)


def test_a_timer_adds_up_wall_and_processor_time(monkeypatch):
    wall, cpu = iter([1.0, 3.0, 10.0, 10.5]), iter([0.0, 1.0, 5.0, 5.25])
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(rounds.time, "process_time", lambda: next(cpu))
    timer = Timer()
    for _ in range(2):
        with timer:
            pass
    assert (timer.wall_s, timer.cpu_s) == (2.5, 1.25)


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


def test_a_source_tree_that_is_not_installed_has_no_version(monkeypatch):
    def not_installed(name):
        raise PackageNotFoundError(name)

    assert process.own_version()[0].isdigit()
    monkeypatch.setattr(process, "version", not_installed)
    assert process.own_version() == "unknown"
