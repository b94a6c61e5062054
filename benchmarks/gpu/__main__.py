"""Measure the engine on a GPU and compare the figures with targets.

    python -m benchmarks.gpu [--list] [--part NAME]... [--device cuda] [--in-flight 1]
        [--shape llama3-8b] [--trace FILE.npz]

Weights are random, of a well-known shape. Acceptance is that of recorded traffic, whose token ids are renumbered if
they exceed the model's vocabulary. Each part is a fixed amount of work in its own process with a time limit; unused
time is added to the limits of later parts. Together with the tests that need a GPU, the parts take at most 9 minutes.
Results are written to benchmarks/results/gpu-DATE.json and to the tables of docs/gpu.md. Without a GPU the parts are
listed. `--device cpu --shape tiny --dtype float32 --scale tiny` tests the benchmark itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.command import PAGE, RESULTS, TRACE, build_parser, child_arguments
from benchmarks.gpu.page import merged, read_results, update_page
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.processes import run_part
from benchmarks.support.command import source_commit
from benchmarks.support.resources import device_name
from drafter_service.observability.measuring.results import versions
from ssd.errors import UserError

PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "numpy", "numba")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts and write their results."""
    parser = build_parser(__doc__)
    options = parser.parse_args(arguments)
    # If the default trace is missing, the parts that need it are skipped.
    if options.trace != TRACE and not options.trace.is_file():
        parser.error(f"--trace {options.trace}: there is no such file; give a recorded trace, .npz")
    parts = [part for part in PARTS if not options.part or part.name in options.part]
    if options.page:
        try:
            update_page(PAGE, merged([read_results(path) for path in options.page]))
        except UserError as error:
            parser.error(str(error))
    elif options.list:
        list_parts(parts)
    elif options.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here, so nothing was measured. On a machine with one this would have run:")
        list_parts(parts)
    else:
        path = options.out or new_results_path(RESULTS, today())
        document = run(parts, options, path)
        print(f"wrote {path}")
        if options.out is None and options.device == "cuda":
            update_page(PAGE, document)
            print(f"updated {PAGE}")


def list_parts(parts: Sequence[Part]) -> None:
    """Print names, titles and time limits."""
    for part in parts:
        print(f"  {part.name:10} {part.limit_s:4} s  {part.title}")
    print(f"  {'in all':10} {sum(part.limit_s for part in parts):4} s")


def run(parts: Sequence[Part], options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Run the parts one after another, and write all results so far to `path` after each."""
    settings = {
        name: getattr(options, name) for name in ("device", "dtype", "attention", "in_flight", "shape", "scale")
    }
    document: dict[str, Any] = {**describe(options.device, options.commit), "settings": settings, "parts": []}
    left = 0.0
    for part in parts:
        print(f"{part.name}: {part.title}", flush=True)
        left += part.limit_s * options.time
        result = run_part(part, child_arguments(options), left)
        left = max(0.0, left - result["seconds"])
        document["parts"].append({**result, "commit": document["commit"]})
        print("\n".join(lines_of(result)), flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def lines_of(result: dict[str, Any]) -> list[str]:
    """Return a part's figures as lines of text."""
    lines = [f"  {row['value']:10.3f} {row['unit']:12} {row['name']}{verdict(row)}" for row in result["figures"]]
    return [*lines, f"  {result['status']}, {result['seconds']} s{': ' if result['reason'] else ''}{result['reason']}"]


def verdict(row: dict[str, Any]) -> str:
    """Return whether a figure reaches its target, as text."""
    if "target" not in row:
        return ""
    return f" ({row['sense']} {row['target']:g}: {'reached' if row['met'] else 'NOT reached'})"


def new_results_path(folder: Path, date: str) -> Path:
    """Return a path that does not exist yet: gpu-DATE.json, gpu-DATE-b.json and so on."""
    names = chain([f"gpu-{date}.json"], (f"gpu-{date}-{letter}.json" for letter in "bcdefghijklmnopqrstuvwxyz"))
    return next(folder / name for name in names if not (folder / name).exists())


def describe(device: str, commit: str | None) -> dict[str, object]:
    """Return what the results were made with."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "gpu": device_name(device),
        "versions": {**versions(PACKAGES), "cuda": torch.version.cuda},
        "commit": commit or source_commit() or "unknown",
    }


def today() -> str:
    """Return the date for a file name."""
    return datetime.now(UTC).date().isoformat()


if __name__ == "__main__":
    main()
