"""A pytest plugin that lists at the end of the output what tests recorded with `record_property`."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Called by pytest."""
    reports = [report for name in ("passed", "failed") for report in terminalreporter.getreports(name)]
    lines = [f"{name}: {value}" for report in reports for name, value in report.user_properties]
    if lines:
        terminalreporter.section("reported")
    for line in lines:
        terminalreporter.write_line(line)
