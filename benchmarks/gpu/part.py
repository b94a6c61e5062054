"""One part in a process of its own: what it measures goes to stdout, a JSON document a line.

A process each, so that a part that runs out of time or memory, or into an illegal access, costs no other its figures.
"""

from __future__ import annotations

import json
import sys

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.command import build_parser, setting_of
from benchmarks.gpu.figures import SkippedError
from benchmarks.gpu.parts import PARTS
from ssd.errors import UserError


def main(arguments: list[str] | None = None) -> None:
    """Run the part that the command line names."""
    options = build_parser().parse_args(arguments)
    [part] = [part for part in PARTS if part.name in options.part]
    try:
        for figure in part.run(Bench(setting_of(options))):
            print(json.dumps({"figure": figure.as_row()}), flush=True)
    except (SkippedError, UserError) as reason:
        print(json.dumps({"skipped": str(reason)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
