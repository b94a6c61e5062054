"""Run a part of the benchmark in its own process, within its time limit.

A part that exceeds its time or memory, or makes an illegal memory access, does not affect other parts. The process
prints its figures to stdout, one JSON document per line.
"""

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

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.command import build_parser, setting_of
from benchmarks.gpu.figures import SkippedError
from benchmarks.gpu.parts import PARTS, Part
from ssd.errors import UserError

REASON_CHARACTERS = 2000
"""Number of characters kept from the end of a failed process's stderr."""


def run_part(part: Part, arguments: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a part; return its figures and how it ended: `ok`, `skipped`, `failed` or `out of time`."""
    command = [sys.executable, "-m", "benchmarks.gpu.processes", "--part", part.name, *arguments]
    began = perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        # Use a separate process group, so that a sidecar is killed as well.
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
        message = errors.read()[-REASON_CHARACTERS:].strip()
    figures, skipped = read_output(output)
    status, reason = "ok", ""
    if is_late:
        status, reason = "out of time", f"stopped after {limit_s:.0f} s"
    elif process.returncode:
        status, reason = "failed", message or f"exit code {process.returncode}"
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
    """Return the figures of a process's output, and why the part was skipped, if it was. Other lines are ignored."""
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


def main(arguments: list[str] | None = None) -> None:
    """Run the part that the command line names, in this process."""
    options = build_parser().parse_args(arguments)
    [part] = [part for part in PARTS if part.name in options.part]
    try:
        for figure in part.run(Bench(setting_of(options))):
            print(json.dumps({"figure": figure.as_row()}), flush=True)
    except (SkippedError, UserError) as reason:
        print(json.dumps({"skipped": str(reason)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
