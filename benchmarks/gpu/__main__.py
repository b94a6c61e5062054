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
from dataclasses import fields
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import SCALES, Setting
from benchmarks.gpu.parts import PARTS, Part, run_part
from benchmarks.gpu.shapes import SHAPES
from benchmarks.support.command import new_parser, source_commit
from benchmarks.support.resources import device_name
from drafter_service.observability.measuring.results import versions
from drafter_service.observability.pages.tables import markdown_table
from engine.commands.options import ATTENTIONS
from engine.models.loader import DTYPES
from ssd.errors import UserError

TRACE = Path("../shared/traces/agent-tau-airline-gpt4o.npz")
RESULTS = Path("benchmarks/results")
PAGE = Path("docs/gpu.md")
PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "numpy", "numba")
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

Document = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts and write their results."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    # If the default trace is missing, the parts that need it are skipped.
    if options.trace != TRACE and not options.trace.is_file():
        parser.error(f"--trace {options.trace}: there is no such file; give a recorded trace, .npz")
    parts = [part for part in PARTS if not options.part or part.name in options.part]
    if options.page:
        try:
            update_page(PAGE, merged([json.loads(path.read_text()) for path in options.page]))
        except (UserError, OSError, ValueError, KeyError) as error:
            parser.error(f"--page: no results of benchmarks.gpu: {error}")
    elif options.list:
        list_parts(parts)
    elif options.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here, so nothing was measured. On a machine with one this would have run:")
        list_parts(parts)
    else:
        path = options.out or new_results_path(RESULTS, datetime.now(UTC).date().isoformat())
        document = run(parts, options, path)
        print(f"wrote {path}")
        if options.out is None and options.device == "cuda":
            update_page(PAGE, document)
            print(f"updated {PAGE}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("gpu", __doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="list what would run, and stop")
    add("--part", action="append", choices=[part.name for part in PARTS], help="run only this part; may be repeated")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cuda")
    add("--dtype", choices=DTYPES, default="bfloat16", help="bfloat16")
    add("--attention", choices=ATTENTIONS, default="auto", help="attention backend (auto: FlashInfer, if installed)")
    add(
        "--in-flight",
        type=int,
        choices=(0, 1),
        help="largest number of steps in flight when the next one is launched (1); on a CPU, 1 uses the graph executor",
    )
    add("--shape", choices=SHAPES, default="llama3-8b", help="shape of the random weights (llama3-8b)")
    add("--scale", choices=SCALES, default="full", help="amount of work: tiny tries the benchmark (full)")
    add("--trace", type=Path, default=TRACE, metavar="FILE", help=f"recorded traffic, .npz ({TRACE})")
    add("--time", type=float, default=1.0, metavar="FACTOR", help="multiplies every part's time limit (1)")
    add("--commit", help="commit in the results; otherwise git's")
    add("--out", type=Path, metavar="FILE", help=f"results; otherwise {RESULTS}/gpu-DATE.json, and {PAGE} is updated")
    add("--page", type=Path, nargs="+", metavar="FILE", help=f"update {PAGE} from these results, and stop")
    return parser


def list_parts(parts: Sequence[Part]) -> None:
    """Print names, titles and time limits."""
    for part in parts:
        print(f"  {part.name:10} {part.limit_s:4} s  {part.title}")
    print(f"  {'in all':10} {sum(part.limit_s for part in parts):4} s")


def run(parts: Sequence[Part], options: argparse.Namespace, path: Path) -> Document:
    """Run the parts one after another, and write all results so far to `path` after each."""
    settings = {field.name: getattr(options, field.name) for field in fields(Setting)}
    document: Document = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "gpu": device_name(options.device),
        "versions": {**versions(PACKAGES), "cuda": torch.version.cuda},
        "commit": options.commit or source_commit() or "unknown",
        "settings": {name: value for name, value in settings.items() if name != "trace"},
        "parts": [],
    }
    left = 0.0
    for part in parts:
        print(f"{part.name}: {part.title}", flush=True)
        left += part.limit_s * options.time
        result = run_part(part, Setting(**settings), left)
        left = max(0.0, left - result["seconds"])
        document["parts"].append({**result, "commit": document["commit"]})
        for row in result["figures"]:
            print("  " + "  ".join(figure_row(row)), flush=True)
        print(f"  {result['seconds']} s, {ending(result)}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n")
    return document


def new_results_path(folder: Path, date: str) -> Path:
    """Return a path that does not exist yet: gpu-DATE.json, gpu-DATE-b.json and so on."""
    names = chain([f"gpu-{date}.json"], (f"gpu-{date}-{letter}.json" for letter in "bcdefghijklmnopqrstuvwxyz"))
    return next(folder / name for name in names if not (folder / name).exists())


def merged(documents: Sequence[Document]) -> Document:
    """Merge results of several runs on one kind of GPU; the last results of a part replace earlier ones.

    Raises UserError for results with different GPUs or settings.
    """
    for field in ("gpu", "settings"):
        if any(document[field] != documents[0][field] for document in documents):
            raise UserError(f"these results differ in their {field}; give those of one run, or of runs that agree")
    parts = {part["name"]: part for document in documents for part in document["parts"]}
    return {**documents[-1], "parts": list(parts.values())}


def update_page(page: Path, document: Document) -> None:
    """Write the tables between the page's markers. Raises UserError if the markers are missing."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{page} has no markers {BEGIN} and {END}; restore them")
    page.write_text(f"{before}{BEGIN}\n{tables(document)}{END}{after}")


def tables(document: Document) -> str:
    """Return the Markdown between the markers."""
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


def figure_row(row: Document) -> tuple[str, str, str, str, str]:
    """Return the name of a figure, its value, the number of values that it is the median of, its target and verdict."""
    target = f"{row['sense']} {row['target']:g}" if "target" in row else ""
    verdict = {None: "", True: "reached", False: "**not reached**"}[row.get("met")]
    return row["name"], f"{row['value']:,.4g} {row['unit']}", str(row["of"]), target, verdict


def ending(part: Document) -> str:
    """Return how a part ended, with the last line of the reason."""
    reason = (part["reason"].splitlines() or [""])[-1].replace("|", "/")
    return f"{part['status']}: {reason}" if reason else str(part["status"])


if __name__ == "__main__":
    main()
