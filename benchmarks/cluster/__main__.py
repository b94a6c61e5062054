"""Run two engines with two sidecars that share what they learn, and cause faults: `python -m benchmarks.cluster`.

The traffic goes through a router. The page cluster.html and the document cluster.json are written to --out; the
document is also the last line of the output. The exit code is 1 if a target was missed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.cluster.faults import FAULTS
from benchmarks.cluster.options import add_engine_options, settings_of
from benchmarks.support.command import new_parser

COST = 0.02
"""Fixed, so that the lengths of drafts do not depend on measured step times."""


def main() -> None:
    """Run the benchmark."""
    parser = new_parser("cluster", __doc__)
    add_engine_options(parser)
    parser.add_argument("--only", default=",".join(FAULTS), help=f"faults to cause ({','.join(FAULTS)}); '' for none")
    parser.add_argument("--out", type=Path, default=Path("build/cluster"), help="folder for results and logs")
    options = parser.parse_args()
    faults = [name for name in options.only.split(",") if name]
    if unknown := set(faults) - set(FAULTS):
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")

    from benchmarks.cluster.page import render_page
    from benchmarks.cluster.run import Run, targets
    from benchmarks.support.targets import conclude
    from ssd.errors import UserError

    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def log(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", file=sys.stderr, flush=True)

    try:
        document = Run(settings_of(options, cost=COST), faults, log).execute()
    except UserError as problem:
        raise SystemExit(str(problem)) from None
    document["targets"] = targets(document)
    conclude("cluster", document, render_page(document), options.out)


if __name__ == "__main__":
    main()
