"""Paths of results, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table with a line break at its end."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)) + "\n"
