"""The real server, started by its command."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

SERVE = (sys.executable, "-m", "drafter_service.commands.main", "serve")


@contextmanager
def served(*arguments):
    """Run `ssd-drafter serve`; yield its process, with its first output as `greeting`, once it listens."""
    process = subprocess.Popen([*SERVE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        process.greeting = process.stdout.readline()
        assert "listening at" in process.greeting, process.stderr.read()
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)
