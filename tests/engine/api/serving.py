"""The real server, as its command starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

from engine.models.shipped import SHIPPED_MODEL

TIMEOUT_S = 60
"""Generous: machines are shared."""
MODEL = "stdlib-7m"


@contextmanager
def serving(*arguments, model=SHIPPED_MODEL):
    """A running `ssd-engine serve` at a free port; yields its `url` and `process`."""
    command = [sys.executable, "-m", "engine.commands.main", "serve", "--model", str(model), "--port", "0"]
    machine = ("--device", "cpu", "--threads", "1")
    process = subprocess.Popen(
        [*command, *machine, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said = ""
        while "serving at" not in said:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            said += line
        yield SimpleNamespace(url=re.search(r"http://\S+", said)[0], process=process)
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)
