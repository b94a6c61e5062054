"""Parts of the benchmarks' command lines."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def new_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for `python -m benchmarks.NAME`, whose help begins with the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


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


def print_document(document: Mapping[str, Any], path: Path | None = None) -> None:
    """Print a document as the last line of the output, and write it to a file."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


def source_commit() -> str:
    """Return the commit of the source tree, with `-changed` if files differ from it; empty without git."""
    command = ["git", "describe", "--always", "--abbrev=12", "--match=", "--dirty=-changed"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
