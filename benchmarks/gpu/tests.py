"""Run the tests that need a GPU, or say which they are.

Only files that have such tests are collected: others may need packages that a GPU machine lacks. Files run beside each
other, each in a process of its own: most of the time goes to compiling kernels, which takes one core for each.
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

SIGNS = ("mark.gpu", "tests.engine.places")
"""Of tests that need a GPU: the marker, or places to run at, of which some are marked."""
LIMIT_S = 150.0
"""All of them together; with the benchmark's parts 9 minutes. Kernels stay compiled, so a second run gets further."""
POLL_S = 0.2
WELL = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
"""A file may have the fixture of those that need a GPU, and no such test."""


@dataclass(frozen=True)
class Group:
    """Tests of one process."""

    file: str

    @property
    def arguments(self) -> list[str]:
        """Of pytest."""
        return ["-m", "gpu", "-q", "-ra", "--durations=3", self.file]


def files(folder: Path = Path("tests")) -> list[str]:
    """Test files in which something is marked, by themselves or by the fixtures beside them."""
    return [str(path) for path in sorted(folder.rglob("test_*.py")) if has_sign(path)]


def has_sign(path: Path) -> bool:
    """Whether some of a file's tests may need a GPU."""
    sources = [own.read_text() for own in (path, path.parent / "conftest.py") if own.exists()]
    return any(sign in source for sign in SIGNS for source in sources)


class Running:
    """A group's process."""

    def __init__(self, group: Group, output: Path) -> None:
        """output: a file that it writes what it says to."""
        self.group = group
        self._output = output
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.reported", *group.arguments]
        self._began = perf_counter()
        # FlashInfer's compilers run beside those of other groups, and take gigabytes each.
        settings = {**os.environ, "MAX_JOBS": str(max(2, (os.cpu_count() or 1) // 4))}
        with output.open("w") as out:
            # A group of its own, so that compilers end with it.
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=settings, process_group=0
            )

    @property
    def has_ended(self) -> bool:
        """Whether it is over."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """Now."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def tell(self, *, is_late: bool) -> bool:
        """Print what came of it; returns whether all is well."""
        is_well = self._process.returncode in WELL
        status = "ok" if is_well else "OUT OF TIME" if is_late else "FAILED"
        print(f"\n{self.group.file}: {status}, {perf_counter() - self._began:.0f} s")
        print(self._output.read_text().rstrip(), flush=True)
        return is_well


def run(chosen: Sequence[Group], limit_s: float) -> int:
    """Run the groups beside each other and tell of each when it ends; 1 if not all of them went well."""
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
                    results.append(one.tell(is_late=is_cut))
                sleep(POLL_S)
        finally:
            for one in running:
                one.stop()
    print(f"\n{sum(results)} of {len(results)} groups of tests went well")
    return 0 if all(results) else 1


class Counting:
    """Counts the tests that pytest would run, by file."""

    def __init__(self) -> None:
        self.counts: Counter[Path] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Called by pytest."""
        self.counts.update(item.path for item in session.items)


def counted(chosen: Sequence[str]) -> Counter[Path]:
    """How many tests of each file need a GPU."""
    counting = Counting()
    with redirect_stdout(StringIO()):
        pytest.main(["-m", "gpu", "--collect-only", "-qq", *chosen], plugins=[counting])
    return counting.counts


def title(file: Path) -> str:
    """The first line of what a file says of itself."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if something failed; 0 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.tests")
    parser.add_argument("--time", type=factor, default=1.0, metavar="FACTOR", help=f"of the limit of {LIMIT_S:.0f} s")
    limit_s = LIMIT_S * parser.parse_args(arguments).time
    chosen = files()
    if torch.cuda.is_available():
        print(f"tests that need a GPU, on {torch.cuda.get_device_name()}, at most {limit_s:.0f} s:", flush=True)
        # Once, before many processes would do it at the same time, and before the clock runs.
        import_module("ssd.drafter")
        return run([Group(file) for file in chosen], limit_s)
    print("There is no CUDA device here, so no test was run. On a machine with one these would have been:", flush=True)
    counts = counted(chosen)
    for file, count in sorted(counts.items()):
        print(f"{count:5}  {os.path.relpath(file)}: {title(file)}")
    print(f"{counts.total():5}  tests in all, at most {limit_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
