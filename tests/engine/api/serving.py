"""Start the real server through its command."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

from engine.models.shipped import SHIPPED_MODEL

TIMEOUT_S = 150
"""Generous, since test machines are shared."""
MODEL = "stdlib-7m"


def eventually(condition):
    """Return the value of `condition` once it is true."""
    until = time.monotonic() + TIMEOUT_S
    while not (value := condition()):
        assert time.monotonic() < until, "the condition did not become true"
        time.sleep(0.01)
    return value


def metric(http, name):
    """Return the sum of a metric's samples."""
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name + "{")]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@contextmanager
def serving(*arguments, model=SHIPPED_MODEL):
    """Run `ssd-engine serve` on a free port, in its own process group; yields an object with `url` and `process`."""
    command = [sys.executable, "-m", "engine.commands.main", "serve", "--model", str(model), "--port", "0"]
    machine = ("--device", "cpu", "--threads", "1")
    process = subprocess.Popen(
        [*command, *machine, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    try:
        printed = ""
        while "serving at" not in printed:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            printed += line
        yield SimpleNamespace(url=re.search(r"http://\S+", printed)[0], process=process)
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)
