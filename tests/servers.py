"""The real server, started by its command."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager

SERVE = (sys.executable, "-m", "drafter_service.commands.main", "serve")


@contextmanager
def served(*arguments):
    """Run `ssd-drafter serve`; once it listens, yield its process, with its first output as `greeting` and its open log
    as `log`.
    """
    # A pipe holds 64 KiB: the service would wait for somebody to read its log.
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*SERVE, *arguments], stdout=subprocess.PIPE, stderr=log, text=True)
        process.log = log
        try:
            process.greeting = process.stdout.readline()
            assert "listening at" in process.greeting, os.pread(log.fileno(), 1 << 16, 0).decode()
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=30)
