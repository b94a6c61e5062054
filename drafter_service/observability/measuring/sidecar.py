"""Run a sidecar in a process of its own while something is measured."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ssd.errors import UserError

STOP_TIMEOUT_S = 10.0
COMMAND = ("-m", "drafter_service.commands.main", "serve")
LOG_LEVEL = ("--log-level", "warning")
"""Limits output, because the pipe is not read."""


class Sidecar(NamedTuple):
    """A process that serves."""

    address: str
    pid: int


@contextmanager
def running_sidecar(*arguments: str) -> Iterator[Sidecar]:
    """Run `ssd-drafter serve` on a temporary Unix socket, yield it, and stop it at the end.

    Raises UserError if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        address = f"unix:{folder}/drafter.sock"
        command = [sys.executable, *COMMAND, "--listen", address, *LOG_LEVEL, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            # It prints its first line when it listens.
            if not process.stdout.readline():
                _, error = process.communicate(timeout=STOP_TIMEOUT_S)
                reason = (error.strip().splitlines() or ["it gave no reason"])[-1]
                raise UserError(f"the sidecar did not start: {reason}")
            yield Sidecar(address, process.pid)
        finally:
            process.terminate()
            try:
                process.communicate(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
