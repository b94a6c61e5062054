"""What all benchmarks share: command lines, results, processor time and memory."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, Any]
"""One line of results."""


def new_parser(name: str, description: str | None, *, has_results: bool = True) -> argparse.ArgumentParser:
    """Return a parser for `python -m benchmarks.NAME`, whose help begins with the module's docstring.

    has_results: whether it has the option `--out`, a file for the results; see `report`.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if has_results:
        parser.add_argument("--out", type=Path, metavar="FILE", help="file for the results")
    return parser


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a parser of comma-separated values."""

    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    return parse


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def say(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def report(document: Mapping[str, Any], out: Path | None = None) -> None:
    """Write a document to a file, and print it as the last line of the output."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document), flush=True)


def with_block(text: str, name: str, block: str) -> str:
    """Return a Markdown text with another block between its lines `<!-- NAME -->` and `<!-- end -->`.

    Raises ValueError if it has no such lines.
    """
    begin, end = f"<!-- {name} -->\n", "<!-- end -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"there is no block {begin.strip()}")
    return f"{before}{begin}{block}{end}{after}"


def source_commit() -> str:
    """Return the commit of the source tree, with `-changed` if files differ from it; empty without git."""
    command = ["git", "describe", "--always", "--abbrev=12", "--match=", "--dirty=-changed"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a running process, without its children."""
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def forget_peak() -> None:
    """Reset the peak of `peak_bytes`."""
    Path("/proc/self/clear_refs").write_text("5")
    if _uses_gpu():
        sys.modules["torch"].cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Return the peak memory since `forget_peak`: of the GPU if this process uses one, else of the process."""
    if _uses_gpu():
        return sys.modules["torch"].cuda.max_memory_allocated()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _uses_gpu() -> bool:
    return "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
