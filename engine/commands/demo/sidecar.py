"""A drafter sidecar for the length of a run, as its own process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from ssd.errors import UserError

STOP_TIMEOUT_S = 10.0
QUIETLY = ("--log-level", "warning")
"""Nobody reads what it says before it ends."""


@contextmanager
def running_sidecar(*arguments: str) -> Iterator[str]:
    """Start `ssd-drafter serve` on a Unix socket of its own; yields its address, and stops it at the end.

    Raises UserError if it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        address = f"unix:{folder}/drafter.sock"
        command = [
            sys.executable,
            "-m",
            "drafter_service.commands.main",
            "serve",
            "--listen",
            address,
            *QUIETLY,
            *arguments,
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            # Its first line says that it listens.
            if not process.stdout.readline():
                _, error = process.communicate(timeout=STOP_TIMEOUT_S)
                reason = (error.strip().splitlines() or ["it gave no reason"])[-1]
                raise UserError(f"the sidecar did not start: {reason}")
            yield address
        finally:
            process.terminate()
            try:
                process.communicate(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
