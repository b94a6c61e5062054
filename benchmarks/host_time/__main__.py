"""Measure the engine's time on the host per step, with a device that answers at once.

    python -m benchmarks.host_time --trace FILE.npz [--at-once 1,16,64,256] [--drafters none,ssd,ssd-remote]
    python -m benchmarks.host_time --trace FILE.npz --against COMMIT    # alternates with the tree of another commit

The engine is the real one, with the graph executor that runs on GPUs. Only what the device computes is replaced, at
the one place where it is launched: a step yields the recorded outputs, and a prompt chunk nothing. Requests arrive as
others end. Steps without drafts are launched ahead, as on a GPU, and those with drafts after the results of the step
before. Draft tokens are selected for the durations of steps of --gpu and --model-size. Each case runs in a process of
its own, and cases alternate.

Times are in milliseconds. `critical` is the time from the results of a step to the launch of the next one, during
which a GPU would wait; `other` is the part of a step that the engine counts as none of its stages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np

from benchmarks.support import ROOT, list_of, new_parser, positive, report, say, source_commit
from drafter_service.observability.measuring.rounds import alternated, columns, median_of
from drafter_service.observability.pages.tables import markdown_table
from ssd.errors import UserError


def main() -> None:
    """Run the command."""
    options = build_parser().parse_args()
    if options.case:
        from benchmarks.host_time.case import run_case

        drafter, at_once = options.case.split(":")
        print(json.dumps(run_case(drafter, int(at_once), options)))
        return
    trees = {"this": ROOT}
    with ExitStack() as stack:
        if options.against:
            trees[options.against] = stack.enter_context(checkout(options.against))
        measured = [(drafter, tree) for drafter in options.drafters for tree in trees]
        cases = [(at_once, drafter, tree) for at_once in options.at_once for drafter, tree in measured]
        runs = {case: partial(run_process, options, trees[case[2]], f"{case[1]}:{case[0]}") for case in cases}
        found = columns(alternated(runs, range(options.rounds)))
    rows = [
        {
            "at once": at_once,
            "drafter": drafter,
            "tree": tree,
            **{name: median_of(rounds, itemgetter(name)) for name in rounds[0]},
        }
        for (at_once, drafter, tree), rounds in found.items()
    ]
    lines = [[f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    print(markdown_table(tuple(rows[0]), lines))
    for drafter, tree in measured:
        points = [(row["at once"], row["median"]) for row in rows if (row["drafter"], row["tree"]) == (drafter, tree)]
        if len(points) > 1:
            slope = 1e3 * float(np.polyfit(*zip(*points, strict=True), 1)[0])
            print(f"{drafter}, {tree}: {slope:.1f} us per sequence")
    report({"commit": source_commit(), "trace": options.trace.name, "rows": rows}, options.out)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("host_time", __doc__)
    parser.add_argument("--trace", type=Path, required=True, help="recorded traffic; see benchmarks.traces")
    parser.add_argument("--at-once", type=list_of(positive), default=[1, 16, 64, 256], metavar="N,N")
    parser.add_argument("--drafters", type=list_of(str), default=["none", "ssd", "ssd-remote"], metavar="KIND,KIND")
    parser.add_argument("--steps", type=positive, default=400, help="measured steps of a case in a round")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--mixed", action="store_true", help="let two of 64 requests want log-probabilities or a bias")
    parser.add_argument("--against", metavar="COMMIT", help="also measure the tree of another commit")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model-size", default="8b")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser


def run_process(options: argparse.Namespace, tree: Path, case: str, number: int) -> dict[str, float]:
    """Measure a case of a round with the source tree in a folder, in a process of its own."""
    say(f"round {number + 1} of {options.rounds}: {case}")
    command = [
        sys.executable, "-m", "benchmarks.host_time", "--case", case, "--trace", options.trace.absolute(),
        "--steps", str(options.steps), "--gpu", options.gpu, "--model-size", options.model_size,
        *(["--mixed"] if options.mixed else []),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        # The error is not always in the last line: libraries print more when the process ends.
        say(done.stderr)
        raise UserError(f"{case} in {tree} failed, see above")
    return dict(json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Yield a folder with the tree of a commit. Raises UserError if it has no such benchmark."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        path = Path(folder) / "tree"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--detach", "--quiet", path, commit], check=True)
        try:
            if not (path / "benchmarks" / "host_time").exists():
                raise UserError(f"--against {commit}: this commit has no benchmarks/host_time; name a later one")
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", path], check=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as problem:
        sys.exit(f"error: {problem}")
