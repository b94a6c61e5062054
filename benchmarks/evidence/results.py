"""The file of results: replays of each trace, and what they were made with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.measure import OUTPUT_TOKENS, Sections, sections_of, skipped
from benchmarks.priors import PRIOR, learn_all, write_left_out
from benchmarks.support.command import RESULTS, ROOT, source_commit
from drafter_service.observability.measuring.results import machine, versions
from ssd.replay import Recording

FILE = RESULTS / "evidence.json"
PARTS = ROOT / "build" / "evidence"
"""Finished traces of a measurement, which continues with the others after an interruption."""
PACKAGES = ("ssd-drafter", "numpy", "numba", "arctic-inference", "transformers")

Document = dict[str, Any]


def measure(paths: Sequence[Path], teachers: Mapping[str, Path], parts: Path, note: Callable[[str], None]) -> Document:
    """Replay traces and return the document of results. Raises ValueError for a file that is not a trace.

    teachers: see `benchmarks.priors.teachers_in`; SSD starts in each of them from values that the others taught, and in
    other traces from the shipped ones. parts: folder for the results of each trace; those of the same commit and
    versions are not measured again.
    """
    made_with = {"commit": source_commit(), "versions": versions(PACKAGES), "output_tokens": OUTPUT_TOKENS}
    parts.mkdir(parents=True, exist_ok=True)
    note("learning start values without each trace")
    left_out = write_left_out(learn_all(teachers))
    sections: Sections = {}
    for path in paths:
        part = parts / f"{path.stem}.json"
        kept = json.loads(part.read_text()) if part.exists() else {}
        if kept.get("made_with") != made_with:
            trace = Recording.load(path).first(OUTPUT_TOKENS)
            kept = {"made_with": made_with, "sections": sections_of(trace, left_out.get(path.stem, PRIOR), note)}
            part.write_text(json.dumps(kept))
        for name, rows in kept["sections"].items():
            sections.setdefault(name, []).extend(rows)
    held_out = sorted(path.stem for path in paths if path.stem not in teachers)
    return {**machine(), **made_with, "held_out": held_out, "skipped": skipped(), "sections": sections}


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
