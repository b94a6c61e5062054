"""Measure the tokens per step of each drafter on recorded traffic.

    python -m benchmarks.replay --trace TRACE.npz --drafter ssd arctic ngram [--cost 0.005,0.02] [--concurrency 1,16]
    python -m benchmarks.replay --trace ROLLOUTS.npz --drafter ssd --groups --concurrency version

docs/replay.md says what a replay is. Reported figures:

    S                  tokens per step / (1 + cost * drafted per step)
    ece                expected calibration error of path probabilities after a tenth of the output
    draft_us           duration of a draft call, which also commits the tokens of the last step, per sequence
    insert_us          duration of all other calls, per token of prompt and output
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.support import Row, list_of, new_parser, positive, report
from benchmarks.support.peers import PEERS, missing, peer_candidates
from benchmarks.support.replaying import BY_VERSION, OWN_DRAFTERS, Candidate, best_rows, own_candidates, replay, row_of
from drafter_service.observability.pages.tables import console_table
from ssd.config import MAX_DRAFT, check_cost
from ssd.replay import Recording

PLAIN_WIDTH = 200
"""Width of the tables in characters if the output is not a terminal."""
COLUMNS = (
    *("concurrency", "trace", "cost", "drafter", "setting", "S", "tokens_per_step"),
    *("drafted_per_step", "accept_rate", "ece", "draft_us_p50", "draft_us_p99", "insert_us_per_token"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay every trace with every drafter in every setting."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        traces = [*map(Recording.load, options.trace)]
    except ValueError as error:
        parser.error(str(error))
    if options.max_output_tokens is not None:
        traces = [trace.first(options.max_output_tokens) for trace in traces]
    if BY_VERSION in options.concurrency:
        for trace in traces:
            if (trace.versions < 0).any():
                parser.error(f"--concurrency {BY_VERSION}: {trace.name} has requests without a version")
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    skipped = {name: reason for name in options.drafter if (reason := missing(name))}
    for name, reason in skipped.items():
        console.print(f"skipped {name}: {reason}")
    candidates = [
        candidate
        for name in options.drafter
        if name not in skipped
        for candidate in (
            own_candidates(name, options.k, options.draft_shape, options.cost)
            if name in OWN_DRAFTERS
            else peer_candidates(name, options.k)
        )
    ]
    rows = replay_all(traces, candidates, options)
    order = sorted(best_rows(rows), key=lambda row: (str(row["concurrency"]).zfill(9), row["trace"], row["cost"]))
    lines = [["-" if row[name] is None else str(row[name]) for name in COLUMNS] for row in order]
    heads = [name.replace("_", " ") for name in COLUMNS]
    console.print(console_table(heads, lines, title="best setting for each trace and cost"))
    report({"results": rows, "skipped": skipped}, options.out)


def replay_all(traces: Sequence[Recording], candidates: Sequence[Candidate], options: argparse.Namespace) -> list[Row]:
    """Run all replays one after another, with progress on stderr."""
    rows: list[Row] = []
    runs = list(itertools.product(options.concurrency, traces, candidates))
    times = 2 if options.warm else 1
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=times * sum(trace.output_tokens for _, trace, _ in runs))
        for concurrency, trace, candidate in runs:
            progress.update(bar, description=f"{trace.name} x{concurrency}: {candidate.drafter} {candidate.setting}")
            tally = replay(
                candidate,
                trace,
                concurrency,
                times=times,
                groups=options.groups,
                watch=lambda tokens: progress.advance(bar, tokens),
            )
            costs = options.cost if candidate.cost is None else [candidate.cost]
            rows += [row_of(trace.name, candidate, cost, concurrency, tally) for cost in costs]
    return rows


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("replay", __doc__)
    add: Any = parser.add_argument
    names = (*OWN_DRAFTERS, *PEERS)
    add("--trace", nargs="+", type=Path, required=True, metavar="PATH", help="recorded traffic, .npz")
    add("--drafter", nargs="+", required=True, choices=names, metavar="NAME", help=", ".join(names))
    add("--k", type=list_of(draft_size), default=[32], help=f"most tokens in a draft, at most {MAX_DRAFT} (32)")
    add("--draft-shape", nargs="+", choices=("path", "tree"), default=["path", "tree"], help="of ssd's drafts (both)")
    add("--cost", type=list_of(share), default=[0.02], help="cost of one more token as a fraction of a step (0.02)")
    at_once = f"requests that run at once (1); {BY_VERSION}: all of a version, then all of the next one"
    add("--concurrency", type=list_of(concurrency), default=[1], help=at_once)
    add("--groups", action="store_true", help="give groups and versions to drafters that use them")
    warm = "replay twice and show the second time; overstates: in production no answer is known in advance"
    add("--warm", action="store_true", help=warm)
    add("--max-output-tokens", type=positive, metavar="N", help="stop after N output tokens of each trace")
    return parser


def concurrency(text: str) -> int | str:
    """Parse a number of requests, or `version`."""
    return text if text == BY_VERSION else positive(text)


def draft_size(text: str) -> int:
    """Parse a number of draft tokens."""
    if positive(text) > MAX_DRAFT:
        raise argparse.ArgumentTypeError(f"a draft has at most {MAX_DRAFT} tokens, not {text}")
    return int(text)


def share(text: str) -> float:
    """Parse a cost."""
    try:
        cost = float(text)
        check_cost(cost)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, up to 1") from None
    return cost


if __name__ == "__main__":
    main()
