"""The file of results: replays of each trace, and what they were made with."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.evidence.markdown import RESULTS, ROOT
from benchmarks.evidence.measure import OUTPUT_TOKENS, Sections, sections_of, skipped
from benchmarks.traces import load_trace

FILE = RESULTS / "evidence.json"
PARTS = ROOT / "build" / "evidence"
"""Finished traces of a measurement, which continues with the others after an interruption."""
PACKAGES = ("ssd-drafter", "numpy", "numba", "arctic-inference", "transformers")

Document = dict[str, Any]


def measure(paths: Sequence[Path], parts: Path, note: Callable[[str], None]) -> Document:
    """Replay traces and return the document of results. Raises ValueError for a file that is not a trace.

    parts: folder for the results of each trace; those of the same commit and versions are not measured again.
    """
    made_with = {"commit": commit(), "versions": versions(), "output_tokens": OUTPUT_TOKENS}
    parts.mkdir(parents=True, exist_ok=True)
    sections: Sections = {}
    for path in paths:
        part = parts / f"{path.stem}.json"
        kept = json.loads(part.read_text()) if part.exists() else {}
        if kept.get("made_with") != made_with:
            trace = load_trace(path).first(OUTPUT_TOKENS)
            kept = {"made_with": made_with, "sections": sections_of(trace, note)}
            part.write_text(json.dumps(kept))
        for name, rows in kept["sections"].items():
            sections.setdefault(name, []).extend(rows)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return {"date": today, **made_with, "skipped": skipped(), "sections": sections}


def write(document: Document, path: Path = FILE) -> None:
    """Write a document, a row on each line."""
    head = {name: value for name, value in document.items() if name != "sections"}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    sections = [
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]"
        for name, rows in document["sections"].items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + ',\n"sections": {\n' + ",\n".join(sections) + "\n}\n}\n")


def read(path: Path = FILE) -> Document:
    """Read a document."""
    return json.loads(path.read_text())


def versions() -> dict[str, str]:
    """Return the versions of Python and of installed packages that results depend on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit of the source tree, with `-changed` if files differ from it; empty without git."""
    run = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty=-changed"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip()
