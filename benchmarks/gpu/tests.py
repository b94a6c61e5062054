"""Run the tests that need a GPU, or list them.

Only files with such tests are collected, because others may need packages that a GPU machine lacks. Files run in
parallel processes, because most of the time is spent compiling kernels, each on one core. As a pytest plugin, this
module prints the values that tests recorded with `record_property`.
"""

from __future__ import annotations

import argparse
import ast
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest

from ssd.corpus.processors import usable_processors

GPU_MARKS = ("mark.gpu", "tests.engine.flashinfer_libraries")
"""Strings that identify files with tests that need a GPU: the marker, or the module whose parameters have it."""
LIMIT_S = 150.0
"""Time limit for all tests in seconds. Compiled kernels are cached, so a second run gets further."""
POLL_S = 0.2
SUCCESS = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
"""Exit codes that count as success. A file may have a GPU fixture, but no test that needs a GPU."""
PYTEST_ARGUMENTS = ("-m", "gpu", "-q", "-ra", "--durations=3")


def files(folder: Path = Path("tests")) -> list[str]:
    """Return test files with tests that need a GPU, by their own text or that of their conftest.py."""
    return [str(path) for path in sorted(folder.rglob("test_*.py")) if may_need_gpu(path)]


def may_need_gpu(path: Path) -> bool:
    """Return whether some of a file's tests may need a GPU."""
    sources = [own.read_text() for own in (path, path.parent / "conftest.py") if own.exists()]
    return any(mark in source for mark in GPU_MARKS for source in sources)


class Running:
    """The process that runs a test file."""

    def __init__(self, file: str, output: Path) -> None:
        """output: file that the process's output is written to."""
        self._file = file
        self._output = output
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.tests", *PYTEST_ARGUMENTS, file]
        self._began = perf_counter()
        # FlashInfer's compilers run in parallel with those of other files, and need gigabytes each.
        settings = {**os.environ, "MAX_JOBS": str(max(2, len(usable_processors()) // 4))}
        with output.open("w") as out:
            # Use a separate process group, so that compilers are killed as well.
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=settings, process_group=0
            )

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """Kill the process and its children."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def report(self, *, is_late: bool) -> bool:
        """Print the outcome and the output; return whether the tests succeeded."""
        has_succeeded = self._process.returncode in SUCCESS
        status = "ok" if has_succeeded else "OUT OF TIME" if is_late else "FAILED"
        print(f"\n{self._file}: {status}, {perf_counter() - self._began:.0f} s")
        print(self._output.read_text().rstrip(), flush=True)
        return has_succeeded


def run(chosen: Sequence[str], limit_s: float) -> int:
    """Run test files in parallel and report each when it ends; return 1 if one failed, else 0."""
    ends = perf_counter() + limit_s
    results = []
    with tempfile.TemporaryDirectory() as folder:
        running = [Running(file, Path(folder, str(number))) for number, file in enumerate(chosen)]
        try:
            while running:
                is_late = perf_counter() > ends
                for one in [one for one in running if is_late or one.has_ended]:
                    running.remove(one)
                    was_stopped = not one.has_ended
                    if was_stopped:
                        one.stop()
                    results.append(one.report(is_late=was_stopped))
                sleep(POLL_S)
        finally:
            for one in running:
                one.stop()
    print(f"\n{sum(results)} of {len(results)} files succeeded")
    return 0 if all(results) else 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the values that tests recorded with `record_property`; called by pytest."""
    reports = [report for name in ("passed", "failed") for report in terminalreporter.getreports(name)]
    lines = [f"{name}: {value}" for report in reports for name, value in report.user_properties]
    if lines:
        terminalreporter.section("reported")
    for line in lines:
        terminalreporter.write_line(line)


class Counting:
    """A pytest plugin that counts collected tests by file."""

    def __init__(self) -> None:
        self.counts: Counter[Path] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count a session's tests; called by pytest."""
        self.counts.update(item.path for item in session.items)


def counted(chosen: Sequence[str]) -> Counter[Path]:
    """Return the number of each file's tests that need a GPU."""
    counting = Counting()
    with redirect_stdout(StringIO()):
        pytest.main(["-m", "gpu", "--collect-only", "-qq", *chosen], plugins=[counting])
    return counting.counts


def title(file: Path) -> str:
    """Return the first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or list the tests; return 1 if one failed, else 0."""
    import torch  # not at the top, because pytest loads this module as a plugin in every process

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.tests")
    parser.add_argument(
        "--time", type=float, default=1.0, metavar="FACTOR", help=f"multiplies the limit of {LIMIT_S:.0f} s (1)"
    )
    limit_s = LIMIT_S * parser.parse_args(arguments).time
    chosen = files()
    if torch.cuda.is_available():
        print(f"tests that need a GPU, on {torch.cuda.get_device_name()}, at most {limit_s:.0f} s:", flush=True)
        # Compiles the kernels once, before the processes would and before the time limit begins.
        import_module("ssd.drafter")
        return run(chosen, limit_s)
    print("There is no CUDA device here, so no test was run. On a machine with one these would have run:", flush=True)
    counts = counted(chosen)
    for file, count in sorted(counts.items()):
        print(f"{count:5}  {os.path.relpath(file)}: {title(file)}")
    print(f"{counts.total():5}  tests in all, at most {limit_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
