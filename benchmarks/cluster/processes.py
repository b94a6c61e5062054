"""A process of the cluster: started, stopped, killed and started again, and the resources that it uses."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.1
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
READ_ERRORS = (FileNotFoundError, ProcessLookupError, PermissionError)
"""A process may end while its files in /proc are read."""


class Usage(NamedTuple):
    """Resources of a process and all its children."""

    cpu_s: float
    """Processor time, including that of earlier runs that were killed or stopped."""
    memory_bytes: int
    """Proportional set size: pages that processes share count once."""
    threads: int
    descriptors: int


class ManagedProcess:
    """A command that runs in a process group of its own, with its output in a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        is_ready: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """name: for reports. log: file to which the output is appended. environment: variables besides the current."""
        self.name = name
        self.command = list(command)
        self.environment = dict(environment or {})
        self._log, self._is_ready = log, is_ready
        self._process: subprocess.Popen[bytes] | None = None
        self._past_cpu_s = 0.0

    def start(self) -> None:
        """Start the process without waiting until it is ready."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    def await_ready(self) -> None:
        """Return once the process serves. Raises SystemExit if it ends, or is not ready in time."""
        until = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self._process is None or self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{self.name} did not start; see {self._log}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """Kill the process and its children with SIGKILL, as the kernel does when memory runs out."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask the process to end, and kill what is left of it after a while."""
        self._end(signal.SIGTERM)

    def usage(self) -> Usage:
        """Return the resources that the process and its children use now."""
        pids = [*self._pids()]
        return Usage(
            self._past_cpu_s + sum(map(_cpu_s, pids)),
            sum(map(_memory_bytes, pids)),
            sum(_count(f"/proc/{pid}/task") for pid in pids),
            sum(_count(f"/proc/{pid}/fd") for pid in pids),
        )

    def _end(self, signal_number: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        self._past_cpu_s = self.usage().cpu_s
        with suppress(ProcessLookupError):
            process.send_signal(signal_number)
            if signal_number == signal.SIGKILL:
                os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None

    def _pids(self) -> Iterator[int]:
        waiting = [] if self._process is None else [self._process.pid]
        while waiting:
            pid = waiting.pop()
            yield pid
            for task in _entries(f"/proc/{pid}/task"):
                with suppress(*READ_ERRORS):
                    waiting += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except READ_ERRORS:
        return 0.0
    # Of the process, and of its children that have ended.
    return sum(map(int, fields[11:15])) / TICKS_PER_S


def _memory_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except READ_ERRORS:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _count(folder: str) -> int:
    return len(_entries(folder))


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except READ_ERRORS:
        return []
