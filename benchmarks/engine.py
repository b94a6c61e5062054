"""Speed of the engine with each drafter at each concurrency, compared with transformers' `generate`.

    python -m benchmarks.engine --model PATH | --shape llama3-8b|llama3-1b|qwen3-0.6b|tiny [--replay TRACE.npz]
        [--structured] [--drafter none,ngram,ssd] [--concurrency 1,4,16,64] [--device cuda] [--dtype bfloat16]
        [--attention flashinfer]

Requests are those of the demo's workload, or with --replay recorded traffic: the model's outputs are then replaced by
the recorded ones, so that a shape with random weights has the acceptance of real text. A trace is an .npz file, see
benchmarks/traces/reading.py. With --structured all outputs match a JSON schema: `none` then verifies no drafts, and
`forced` drafts only the tokens that the schema forces, as the other drafters do besides their own. Every run begins
with an empty cache and an empty corpus. Cases alternate, in
reversed order every second round; figures are medians over the rounds:

    tokens_per_s          output tokens divided by the time of the whole run, prompts included
    speedup_vs_none       ratio to `none` at the same concurrency in the same round
    cpu_ms_per_token      processor time of all threads; null for transformers
    itl_ms                time between two tokens of a request; tokens of one step share its duration
    ttft_ms               time from adding a request to its first token
    tokens_per_step       per sequence; drafted_per_step likewise
    overhead_ms_per_step  time outside model and drafter, median of the steps in which every sequence produced tokens
    share                 share of each stage in the time of all steps; commit includes drafters' `finish`
    peak_mib              peak memory of the process, including the models of all cases; on a GPU: GPU memory
    identical_to_none     whether all outputs equal those of `none`; null without `none`, and with --replay

The last line is one JSON document. Times depend on the machine: compare only within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.replay import PLAIN_WIDTH, list_of, positive
from benchmarks.support.engine_rows import FORCED
from engine.commands.openmp import limit_spinning
from engine.commands.options import ATTENTIONS, DTYPES
from engine.drafters.kinds import KINDS
from engine.drafters.registry import parse_kinds
from ssd.errors import UserError

COLUMNS = ("drafter", "concurrency", "tokens_per_s", "speedup_vs_none", "itl_ms_p50", "itl_ms_p99", "ttft_ms_p50")
MORE_COLUMNS = (
    "cpu_ms_per_token",
    "tokens_per_step",
    "drafted_per_step",
    "overhead_ms_per_step",
    "peak_mib",
    "identical_to_none",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every case and print the table and the document."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    limit_spinning(os.environ)
    # PyTorch takes seconds to import.
    from benchmarks.support.engine_comparison import prepare, run_rounds
    from benchmarks.support.engine_rows import rows_of

    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    try:
        comparison, cases, notes = prepare(options)
        for note in notes:
            console.print(note, markup=False)
        rounds = run_rounds(comparison, cases, options.rounds)
    except UserError as error:
        parser.error(str(error))
    rows = rows_of(rounds, replayed=options.replay is not None)
    print_rows(console, rows)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    document = {"results": rows, "notes": notes, "settings": settings, "load": os.getloadavg()[0]}
    print(json.dumps(document))


def print_rows(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print the figures as a table."""
    table = Table()
    for name in (*COLUMNS, *MORE_COLUMNS):
        table.add_column(name.replace("_", " "), justify="left" if name == "drafter" else "right")
    for row in rows:
        table.add_row(*("-" if row[name] is None else str(row[name]) for name in (*COLUMNS, *MORE_COLUMNS)))
    console.print(table)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, metavar="PATH", help="a Hugging Face folder or name (the shipped model)")
    which.add_argument("--shape", type=shape_name, metavar="NAME", help="or random weights of this shape")
    add: Any = parser.add_argument
    add("--device", default="auto", help="cpu, cuda, ... (a GPU where there is one)")
    add("--dtype", choices=DTYPES, default="auto", help="float32 on a CPU, bfloat16 on a GPU")
    add("--attention", choices=ATTENTIONS, default="auto", help="FlashInfer's on a GPU where it is installed")
    add("--replay", type=Path, metavar="TRACE", help="recorded traffic, .npz, instead of the model's outputs")
    add("--structured", action="store_true", help="outputs are JSON descriptions of the prompts' functions")
    add("--drafter", type=list_of(drafter_name), default=["none", "ssd"], help=f"none,ssd; of {','.join(KINDS)}")
    add("--concurrency", type=list_of(positive), default=[1, 4, 16, 64], help="requests that run at once (1,4,16,64)")
    add("--requests", type=positive, default=64, metavar="N", help="64")
    add("--repeats", action=argparse.BooleanOptionalAction, default=True, help="the demo's repeats, or all prompts new")
    add("--prompt-tokens", type=positive, default=512, metavar="N", help="longer prompts lose their beginning (512)")
    add("--max-tokens", type=positive, default=128, metavar="N", help="per output (128)")
    add("--ignore-eos", action="store_true", help="every output has --max-tokens")
    add("--temperature", type=float, default=0.0, help="0, greedy")
    add("--rounds", type=positive, default=3, metavar="N", help="3")
    add("--threads", type=positive, metavar="N", help="of PyTorch, for all cases")
    add(
        "--in-flight",
        type=int,
        choices=(0, 1),
        help="steps in flight while the next one is planned (decided at run time)",
    )
    add("--peers", action=argparse.BooleanOptionalAction, default=True, help="run transformers as well")
    return parser


def shape_name(text: str) -> str:
    """Check the name of a shape."""
    from benchmarks.support import shapes

    if text not in shapes.SHAPES:
        raise argparse.ArgumentTypeError(f"shapes are {', '.join(shapes.SHAPES)}, not {text!r}")
    return text


def drafter_name(text: str) -> str:
    """Check the name of a drafter."""
    try:
        if text != FORCED:
            parse_kinds(text)
        return text
    except UserError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


if __name__ == "__main__":
    main()
