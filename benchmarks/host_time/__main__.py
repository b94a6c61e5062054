"""Measure the engine's time on the host per step, with a device that answers at once.

    python -m benchmarks.host_time --trace FILE.npz [--at-once 1,16,64,256] [--drafters none,ssd,ssd-remote]
    python -m benchmarks.host_time --trace FILE.npz --against COMMIT    # alternates with the tree of another commit

The engine is the real one, with the graph executor that runs on GPUs. Only what the device computes is replaced, at
the one place where it is launched: a step yields the recorded outputs, and a prompt chunk nothing. Requests arrive as
others end. Steps without drafts are launched ahead, as on a GPU, and those with drafts after the results of the step
before. Draft tokens are selected for the durations of steps of --gpu and --model-size. Each case runs in a process of
its own, and cases alternate.

Where --hosts has vLLM for CPUs (`make hosts-install`), the rows `vllm` and `vllm suffix` are the time of vLLM 0.32 for
the same requests: `schedule` is `Scheduler.schedule`, `draft` is `SuffixDecodingProposer.propose`, `forward` the V1
runner's `_update_states` and `_prepare_inputs` (with the slot mapping, which a GPU computes itself), and `commit` is
`Scheduler.update_from_output`. Median, p90 and mean are of their sum. `other` is the rest of the step, such as the
metadata of attention on a CPU, which `critical` also contains. vLLM for CPUs launches each step after the results of
the step before; on GPUs it launches steps ahead, unless drafts are made on the CPU.

Times are in milliseconds. `critical` is the time from the results of a step to the launch of the next one, during
which a GPU would wait; `other` is the part of a step that the engine counts as none of its stages. The last line of the
output is one JSON document.
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

from benchmarks.hosts.engines import HOSTS, VLLM_ENVIRONMENT
from benchmarks.support import ROOT, list_of, new_parser, positive, report, say, source_commit
from drafter_service.observability.measuring.rounds import alternated, columns, median_of
from drafter_service.observability.pages.tables import markdown_table
from ssd.errors import UserError

VLLM_METHODS = {"vllm": "none", "vllm suffix": "suffix"}
"""Rows of the table that vLLM measures, and the methods of its speculation."""


def main() -> None:
    """Run the command."""
    options = build_parser().parse_args()
    if options.case:
        drafter, at_once = options.case.split(":")
        if drafter in VLLM_METHODS:
            from benchmarks.host_time.vllm_case import run_case

            drafter = VLLM_METHODS[drafter]
        else:
            from benchmarks.host_time.case import run_case
        print(json.dumps(run_case(drafter, int(at_once), options)))
        return
    trees = {"this": ROOT}
    with ExitStack() as stack:
        if options.against:
            trees[options.against] = stack.enter_context(checkout(options.against))
        measured = [(drafter, tree) for drafter in options.drafters for tree in trees]
        if not options.server:
            measured += [(row, "this") for row in vllm_rows(options.hosts)]
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
    report(
        {"commit": source_commit(), "trace": options.trace.name, "server": options.server, "rows": rows}, options.out
    )


def vllm_rows(hosts: Path) -> list[str]:
    """Return the rows that an environment with vLLM can measure; say on stderr how to get the others."""
    if not (hosts / ".ready").exists():
        say(f"no rows of vLLM: it is not installed in {hosts}; run `make hosts-install`")
        return []
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('arctic_inference') is None)"
    if subprocess.run([hosts / "bin" / "python", "-c", find], check=False).returncode:
        say("no row `vllm suffix`: arctic-inference is not installed; `make hosts-bench` builds it")
        return ["vllm"]
    return list(VLLM_METHODS)


def run_process(options: argparse.Namespace, tree: Path, case: str, number: int) -> dict[str, float]:
    """Measure a case of a round with the source tree in a folder, in a process of its own."""
    say(f"round {number + 1} of {options.rounds}: {case}")
    is_vllm = case.split(":")[0] in VLLM_METHODS
    command = [
        (options.hosts / "bin" / "python").absolute() if is_vllm else sys.executable,
        "-m", "benchmarks.host_time", "--case", case, "--trace", options.trace.absolute(),
        "--steps", str(options.steps), "--gpu", options.gpu, "--model-size", options.model_size,
        *(["--server"] if options.server else []), *(["--mixed"] if options.mixed else []),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    if is_vllm:
        environment |= {**VLLM_ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": "0"}
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


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("host_time", __doc__)
    parser.add_argument("--trace", type=Path, required=True, help="recorded traffic; see benchmarks.traces")
    parser.add_argument("--at-once", type=list_of(positive), default=[1, 16, 64, 256], metavar="N,N")
    parser.add_argument("--drafters", type=list_of(str), default=["none", "ssd", "ssd-remote"], metavar="KIND,KIND")
    parser.add_argument("--steps", type=positive, default=400, help="measured steps of a case in a round")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--hosts", type=Path, default=HOSTS, help=f"virtual environment with vLLM ({HOSTS})")
    parser.add_argument(
        "--server", action="store_true", help="run the server's engine process, with a pipe to another, without vLLM"
    )
    parser.add_argument("--mixed", action="store_true", help="let two of 64 requests want log-probabilities or a bias")
    parser.add_argument("--against", metavar="COMMIT", help="also measure the tree of another commit")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--model-size", default="8b")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    try:
        main()
    except UserError as problem:
        sys.exit(f"error: {problem}")
