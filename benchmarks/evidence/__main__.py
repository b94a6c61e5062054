"""Replay recorded traffic with all drafters that are installed, and write the tables of the documentation.

    python -m benchmarks.evidence [--traces build/traces] [--tables-only]

If a trace is one of those that SSD's start values are learned from, they are learned again without it
(`benchmarks.priors --without`), so the others must be there, too. After an interruption the same command continues with
the next trace. Results go to `benchmarks/results/evidence.json`, and the tables made from them into README.md and
docs/drafting.md. `python -m benchmarks.traces fetch all` makes the traces, `make peers` installs Arctic.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.evidence.measure import FILE, PARTS, measure, read, write
from benchmarks.evidence.tables import DOCUMENTS, updated
from benchmarks.priors import teacher_names, teachers_in
from benchmarks.support.command import new_parser

TRACES = Path("build/traces")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, unless only tables are requested, and update the documentation."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if not options.tables_only:
        paths = sorted(options.traces.glob("*.npz"))
        if not paths:
            parser.error(f"{options.traces} has no traces; `python -m benchmarks.traces fetch all` makes them")
        try:
            teachers = teachers_in(options.traces) if {path.stem for path in paths} & {*teacher_names()} else {}
        except ValueError as error:
            parser.error(str(error))
        with Console(stderr=True).status("reading traces") as status:
            document = measure(paths, teachers, PARTS, status.update)
        for name, reason in document["skipped"].items():
            print(f"skipped {name}: {reason}")
        write(document)
        print(f"wrote {FILE}")
    for path in DOCUMENTS:
        path.write_text(updated(path.read_text(), read()))
        print(f"updated {path}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("evidence", __doc__)
    parser.add_argument("--traces", type=Path, default=TRACES, help=f"folder of traces ({TRACES})")
    parser.add_argument("--tables-only", action="store_true", help="make the tables from the last results")
    return parser


if __name__ == "__main__":
    main()
