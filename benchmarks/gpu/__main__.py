"""Measure the engine on a GPU and compare the figures with targets.

    python -m benchmarks.gpu [--list] [--part NAME]... [--device cuda] [--in-flight 1]
        [--shape llama3-8b] [--trace FILE.npz]

Weights are random, of a well-known shape. Acceptance is that of recorded traffic, whose token ids are renumbered if
they exceed the model's vocabulary. Each part is a fixed amount of work in its own process with a time limit, so that
one that exceeds its time or memory, or makes an illegal memory access, does not affect others; unused time is added to
the limits of later parts. Together with the tests that need a GPU, the parts take at most 9 minutes. Results are
written to benchmarks/results/gpu-DATE.json, where those of other parts of the same day are kept, and to the tables of
docs/gpu.md. Without a GPU the parts are listed. `--device cpu --shape tiny --dtype float32 --scale tiny` tests the
benchmark itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.gpu.bench import SCALES, SHAPES, Bench, SkippedError
from benchmarks.gpu.parts import PARTS
from benchmarks.support import RESULTS, ROOT, Row, new_parser, source_commit, with_block
from drafter_service.observability.measuring.results import versions
from drafter_service.observability.pages.tables import markdown_table
from engine.commands.options import ATTENTIONS
from engine.models.loader import DTYPES
from ssd.errors import UserError

TRACE = Path("../shared/traces/agent-tau-airline-gpt4o.npz")
PAGE = ROOT / "docs" / "gpu.md"
PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "numpy", "numba")
SETTINGS = ("device", "dtype", "attention", "shape", "scale", "in_flight")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts and write their results."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.child:
        run_here(options)
        return
    # If the default trace is missing, the parts that need it are skipped.
    if options.trace != TRACE and not options.trace.is_file():
        parser.error(f"--trace {options.trace}: there is no such file; give a recorded trace, .npz")
    names = options.part or [*PARTS]
    has_device = options.device == "cpu" or torch.cuda.is_available()
    if options.list or not has_device:
        if not has_device:
            print("There is no CUDA device here, so nothing was measured. On a machine with one this would have run:")
        for name in names:
            print(f"  {name:10} {PARTS[name].limit_s:4} s  {PARTS[name].title}")
        print(f"  {'in all':10} {sum(PARTS[name].limit_s for name in names):4} s")
        return
    path = options.out or RESULTS / f"gpu-{datetime.now(UTC).date().isoformat()}.json"
    document = run(names, options, arguments, path)
    print(f"wrote {path}")
    if options.out is None and options.device == "cuda":
        PAGE.write_text(with_block(PAGE.read_text(), "figures", tables(document)))
        print(f"updated {PAGE}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("gpu", __doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="list what would run, and stop")
    add("--part", action="append", choices=PARTS, help="run only this part; may be repeated")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cuda")
    add("--dtype", choices=DTYPES, default="bfloat16", help="bfloat16")
    add("--attention", choices=ATTENTIONS, default="auto", help="attention backend (auto: FlashInfer, if installed)")
    in_flight = (
        "largest number of steps in flight when the next one is launched (1); on a CPU, 1 uses the graph executor"
    )
    add("--in-flight", type=int, choices=(0, 1), help=in_flight)
    add("--shape", choices=SHAPES, default="llama3-8b", help="shape of the random weights (llama3-8b)")
    add("--scale", choices=SCALES, default="full", help="amount of work: tiny tries the benchmark (full)")
    add("--trace", type=Path, default=TRACE, metavar="FILE", help=f"recorded traffic, .npz ({TRACE})")
    add("--time", type=float, default=1.0, metavar="FACTOR", help="multiplies every part's time limit (1)")
    add("--commit", help="commit in the results; otherwise git's")
    add("--child", choices=PARTS, help=argparse.SUPPRESS)
    return parser


def run(names: Sequence[str], options: argparse.Namespace, arguments: Sequence[str], path: Path) -> Row:
    """Run the parts one after another, and write all results so far to `path` after each.

    Results of other parts in the file are kept. Raises UserError if those are of another GPU or other settings.
    """
    fixed = {
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "settings": {name: getattr(options, name) for name in SETTINGS},
    }
    document: Row = json.loads(path.read_text()) if path.exists() else {**fixed, "parts": []}
    if {name: document[name] for name in fixed} != fixed:
        raise UserError(f"{path} has results of another GPU or other settings; give another file with --out")
    commit, left = options.commit or source_commit() or "unknown", 0.0
    document |= {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "versions": {**versions(PACKAGES), "cuda": torch.version.cuda},
        "commit": commit,
    }
    parts = {part["name"]: part for part in document["parts"]}
    for name in names:
        print(f"{name}: {PARTS[name].title}", flush=True)
        left += PARTS[name].limit_s * options.time
        parts[name] = {**run_part(name, arguments, left), "commit": commit}
        left = max(0.0, left - parts[name]["seconds"])
        for row in parts[name]["figures"]:
            print("  " + "  ".join(figure_row(row)), flush=True)
        print(f"  {parts[name]['seconds']} s, {ending(parts[name])}", flush=True)
        document["parts"] = [parts[each] for each in PARTS if each in parts]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def run_part(name: str, arguments: Sequence[str], limit_s: float) -> Row:
    """Run a part in a process; return its figures and how it ended: `ok`, `skipped`, `failed` or `out of time`."""
    began = perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", *arguments, "--child", name],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    end: Row = {}
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        end = {"status": "out of time", "reason": f"stopped after {limit_s:.0f} s"}
    finally:
        # With a sidecar, if it has started one.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if end:
        output, _ = process.communicate()
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    end = end or next((row for row in rows if "status" in row), {"status": "failed"})
    return {
        "name": name,
        "title": PARTS[name].title,
        "limit_s": limit_s,
        "seconds": round(perf_counter() - began, 1),
        "reason": f"exit code {process.returncode}",
        **end,
        "figures": [row for row in rows if "status" not in row],
    }


def run_here(options: argparse.Namespace) -> None:
    """Run a part in this process; print each figure, and then how the part ended, as a line of JSON."""
    end = {"status": "ok", "reason": ""}
    try:
        for row in PARTS[options.child].run(Bench(options)):
            print(json.dumps(row), flush=True)
    except (SkippedError, UserError) as problem:
        end = {"status": "skipped", "reason": str(problem)}
    except Exception as problem:
        traceback.print_exc()
        end = {"status": "failed", "reason": "".join(traceback.format_exception_only(problem)).strip()}
    print(json.dumps(end), flush=True)


def tables(document: Row) -> str:
    """Return the Markdown of the figures and of the parts."""
    settings, parts = document["settings"], document["parts"]
    known = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    figures = [figure_row(row) for part in parts for row in part["figures"]]
    endings = [(part["name"], part["title"], ending(part), f"{part['seconds']:g}", part["commit"]) for part in parts]
    return "\n".join(
        (
            f"{document['date']}, {document['gpu']}, {known}. "
            f"Random weights of the shape {settings['shape']}, {settings['dtype']}; "
            f"steps in flight: {'decided at run time' if settings['in_flight'] is None else settings['in_flight']}.",
            "",
            markdown_table(("figure", "measured", "median of", "target", ""), figures),
            markdown_table(("part", "question", "ended", "s", "commit"), endings),
        )
    )


def figure_row(row: Row) -> tuple[str, str, str, str, str]:
    """Return the name of a figure, its value, the number of values that it is the median of, its target and verdict."""
    goal = f"{row['sense']} {row['target']:g}" if "target" in row else ""
    verdict = {None: "", True: "reached", False: "**not reached**"}[row.get("met")]
    return row["name"], f"{row['value']:,.4g} {row['unit']}", str(row["of"]), goal, verdict


def ending(part: Row) -> str:
    """Return how a part ended, with the last line of the reason."""
    reason = (part["reason"].splitlines() or [""])[-1].replace("|", "/")
    return f"{part['status']}: {reason}" if reason else str(part["status"])


if __name__ == "__main__":
    main()
