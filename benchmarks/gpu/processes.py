"""A part in a process of its own, within its time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from benchmarks.gpu.parts import Part

REASON_CHARACTERS = 2000
"""Of what a process that failed said last."""


def run_part(part: Part, arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """What the part reported, and how it ended: `ok`, `skipped`, `failed` or `out of time`."""
    command = [sys.executable, "-m", "benchmarks.gpu.part", "--part", part.name, *arguments]
    began = perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        # A group of its own, so that a sidecar ends with it.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, process_group=0)
        is_late = False
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        errors.seek(0)
        said = errors.read()[-REASON_CHARACTERS:].strip()
    figures, skipped = read_output(output)
    status, reason = "ok", ""
    if is_late:
        status, reason = "out of time", f"stopped after {limit_s:.0f} s"
    elif process.returncode:
        status, reason = "failed", said or f"exit code {process.returncode}"
    elif skipped is not None:
        status, reason = "skipped", skipped
    return {
        "name": part.name,
        "title": part.title,
        "limit_s": limit_s,
        "seconds": round(perf_counter() - began, 1),
        "status": status,
        "reason": reason,
        "figures": figures,
    }


def read_output(output: str) -> tuple[list[dict[str, Any]], str | None]:
    """Figures, and why the part was skipped, if it was. What else was printed, or was cut off, is passed over."""
    figures, skipped = [], None
    for line in output.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            figures += [document["figure"]] if "figure" in document else []
            skipped = document.get("skipped", skipped)
    return figures, skipped
