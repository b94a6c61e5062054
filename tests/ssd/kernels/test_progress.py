from numba import njit

from ssd.kernels import progress
from ssd.kernels.progress import LAST, ProgressLines, log_compilation, watched_compilation


def test_compiled_functions_are_reported_up_to_99_percent_and_known_ones_are_not():
    @njit
    def inner(number):
        return number + 1

    @njit
    def outer(number):
        return inner(number) * 2

    reports = []
    with watched_compilation(reports.append, work=2):
        assert outer(1) == 4
    assert reports == [0, 0]  # The outer one begins first; none is complete before the inner one.
    reports.clear()
    with watched_compilation(reports.append, work=1):
        outer(2)
        outer(1.5)
        inner(1.5)
        inner(1j)
    outer(1j)
    assert reports == [0, 0, LAST]


def test_a_line_is_written_for_every_ten_percent():
    lines = []
    report = ProgressLines(lines.append)
    for percent in (0, 3, 9, 10, 19, 41, 49, 50):
        report(percent)
    assert lines == [
        "compiling kernels, once after an installation or update: 0 %",
        "compiling kernels: 10 %",
        "compiling kernels: 41 %",
        "compiling kernels: 50 %",
    ]


def test_compiling_without_reports_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(progress, "_unwatched_s", 0.0)
    with watched_compilation(lambda _: None):
        log_compilation(9.0)
    log_compilation(1.0)
    assert caplog.messages == []
    for _ in range(3):
        log_compilation(1.0)
    assert caplog.messages == ["compiling kernels, once after an installation or update: this takes up to a minute"]
