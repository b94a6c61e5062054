"""Run the tests that need a GPU, or list them.

Only files that have such tests are collected: others may need packages that a GPU machine lacks. Files run in parallel,
each in a process of its own: most of the time goes to compiling kernels, each on one core.
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
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from time import perf_counter, sleep

import pytest
import torch

from benchmarks.gpu.factor import factor

SIGNS = ("mark.gpu", "tests.engine.flashinfer_libraries")
"""Texts in files with tests that need a GPU: the marker, or the module whose parameters have it."""
LIMIT_S = 150.0
"""Limit for all of them; with the benchmark's parts 9 minutes. Kernels stay compiled, so a second run gets further."""
POLL_S = 0.2
WELL = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
"""Exit codes of success. A file may have a fixture for a GPU, but no test that needs one."""


@dataclass(frozen=True)
class Group:
    """Tests that run in one process."""

    file: str

    @property
    def arguments(self) -> list[str]:
        """Arguments of pytest."""
        return ["-m", "gpu", "-q", "-ra", "--durations=3", self.file]


def files(folder: Path = Path("tests")) -> list[str]:
    """Return test files with tests that need a GPU, by their own text or that of their conftest.py."""
    return [str(path) for path in sorted(folder.rglob("test_*.py")) if has_sign(path)]


def has_sign(path: Path) -> bool:
    """Return whether some of a file's tests may need a GPU."""
    sources = [own.read_text() for own in (path, path.parent / "conftest.py") if own.exists()]
    return any(sign in source for sign in SIGNS for source in sources)


class Running:
    """A group's process."""

    def __init__(self, group: Group, output: Path) -> None:
        """output: the file for its output."""
        self.group = group
        self._output = output
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.reported", *group.arguments]
        self._began = perf_counter()
        # FlashInfer's compilers run in parallel with those of other groups, and need gigabytes each.
        settings = {**os.environ, "MAX_JOBS": str(max(2, (os.cpu_count() or 1) // 4))}
        with output.open("w") as out:
            # A group of its own, so that compilers end with it.
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
        is_well = self._process.returncode in WELL
        status = "ok" if is_well else "OUT OF TIME" if is_late else "FAILED"
        print(f"\n{self.group.file}: {status}, {perf_counter() - self._began:.0f} s")
        print(self._output.read_text().rstrip(), flush=True)
        return is_well


def run(chosen: Sequence[Group], limit_s: float) -> int:
    """Run the groups in parallel and report each when it ends; return 1 if one failed, else 0."""
    ends = perf_counter() + limit_s
    results = []
    with tempfile.TemporaryDirectory() as folder:
        running = [Running(group, Path(folder, str(number))) for number, group in enumerate(chosen)]
        try:
            while running:
                is_late = perf_counter() > ends
                for one in [one for one in running if is_late or one.has_ended]:
                    running.remove(one)
                    is_cut = not one.has_ended
                    if is_cut:
                        one.stop()
                    results.append(one.report(is_late=is_cut))
                sleep(POLL_S)
        finally:
            for one in running:
                one.stop()
    print(f"\n{sum(results)} of {len(results)} groups of tests succeeded")
    return 0 if all(results) else 1


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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.tests")
    parser.add_argument("--time", type=factor, default=1.0, metavar="FACTOR", help=f"of the limit of {LIMIT_S:.0f} s")
    limit_s = LIMIT_S * parser.parse_args(arguments).time
    chosen = files()
    if torch.cuda.is_available():
        print(f"tests that need a GPU, on {torch.cuda.get_device_name()}, at most {limit_s:.0f} s:", flush=True)
        # Once, before many processes would do it at the same time, and before the clock runs.
        import_module("ssd.drafter")
        return run([Group(file) for file in chosen], limit_s)
    print("There is no CUDA device here, so no test was run. On a machine with one these would have run:", flush=True)
    counts = counted(chosen)
    for file, count in sorted(counts.items()):
        print(f"{count:5}  {os.path.relpath(file)}: {title(file)}")
    print(f"{counts.total():5}  tests in all, at most {limit_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
