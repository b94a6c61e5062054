"""Measure the tokens per step of each drafter on recorded traffic.

    python -m benchmarks.replay --trace TRACE.npz --drafter ssd arctic ngram [--cost 0.005,0.02] [--concurrency 1,16]
    python -m benchmarks.replay --trace ROLLOUTS.npz --drafter ssd das specrl --groups --concurrency version
    python -m benchmarks.replay --trace TRACE.npz --drafter ssd --reads OTHER.npz

The recorded output replaces the target's greedy output. A step drafts for one sequence, accepts the longest path of the
draft that agrees with the output, and adds the target's own next token. Draft tokens beyond the output's end count as
drafted. Reported figures:

    S                     tokens per step / (1 + cost * drafted per step)
    tokens_per_step_late  tokens per step of requests whose group occurred in at least 3 earlier versions
    ece, ece_all          expected calibration error of path probabilities after a tenth of the output, and in all
    draft_us              duration of a draft call, which also commits the tokens of the last step, per sequence
    insert_us             duration of all other calls, per token of prompt and output
    bytes_per_token       memory per remembered token
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks.support.command import list_of, new_parser, positive, print_document
from benchmarks.support.drafters import OWN_DRAFTERS, Candidate, own_candidates, with_library
from benchmarks.support.peers import PEERS, ROLLOUT_PEERS, missing, peer_candidates
from benchmarks.support.scores import BY_VERSION, Row, best_rows, compare, row_of
from drafter_service.observability.pages.tables import console_table
from ssd.config import MAX_DRAFT, check_cost
from ssd.replay import RecordedRequest, Recording

VOCABULARY = 50_000
SOURCE_TOKENS = 4_000
COPIES = 10
PLAIN_WIDTH = 200
"""Width of the tables in characters if the output is not a terminal."""
COLUMNS = (
    *("concurrency", "trace", "cost", "drafter", "setting", "S", "tokens_per_step"),
    *("tokens_per_step_late", "drafted_per_step", "accept_rate", "ece"),
    *("draft_us_p50", "draft_us_p99", "insert_us_per_token", "bytes_per_token"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay every trace with every drafter in every setting."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        traces = [*map(Recording.load, options.trace), *map(copy_edit, options.synthetic)]
        library = None if options.reads is None else halves(Recording.load(options.reads))[0]
    except ValueError as error:
        parser.error(str(error))
    if not traces:
        parser.error("give --trace, --synthetic or both")
    if options.reads is not None:
        traces = [second for trace in traces if len(second := halves(trace)[1])]
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
    candidates = [each for name in options.drafter if name not in skipped for each in candidates_of(name, options)]
    if library is not None:
        candidates = [both for each in candidates if each.drafter == "ssd" for both in with_library(each, library)]
    rows = replay_all(traces, candidates, options)
    comparison = compare(rows)
    print_best(console, rows)
    print_comparison(console, comparison)
    print_document({"results": rows, "comparison": comparison, "skipped": skipped}, options.out)


def candidates_of(drafter: str, options: argparse.Namespace) -> list[Candidate]:
    """Return the settings of a drafter that the command line selects."""
    if drafter in OWN_DRAFTERS:
        return list(own_candidates(drafter, options.k, options.draft_shape, options.cost))
    return list(peer_candidates(drafter, options.k))


def replay_all(traces: Sequence[Recording], candidates: Sequence[Candidate], options: argparse.Namespace) -> list[Row]:
    """Run all replays one after another, with progress on stderr."""
    # The kernels take seconds to import.
    from benchmarks.support.replaying import replay

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


def print_best(console: Console, rows: Sequence[Row]) -> None:
    """Print the best setting of each drafter for each trace and cost."""
    lines = [
        ["-" if row[name] is None else str(row[name]) for name in COLUMNS]
        for row in sorted(best_rows(rows), key=_place)
    ]
    heads = [name.replace("_", " ") for name in COLUMNS]
    console.print(console_table(heads, lines, title="best setting for each trace and cost"))


def _place(row: Row) -> tuple[Any, ...]:
    """Return what rows are sorted by: a number of requests at once precedes `BY_VERSION`."""
    return row["concurrency"] == BY_VERSION, row["concurrency"], row["trace"], row["cost"]


def print_comparison(console: Console, comparison: Sequence[Row]) -> None:
    """Print the ratio of this project's drafters to each of the others."""
    if not comparison:
        return
    who, traces = ("ssd", "against", "concurrency", "cost"), comparison[0]["by_trace"]
    lines = []
    for line in comparison:
        ratios = (*line["by_trace"].values(), line["geometric_mean"])
        lines.append([*(str(line[name]) for name in who), *(f"{ratio:.3f}" for ratio in ratios)])
    heads = (*who, *traces, "geometric mean")
    console.print(console_table(heads, lines, title="S of ssd / S of the other at its best"))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("replay", __doc__)
    add, names = parser.add_argument, (*OWN_DRAFTERS, *PEERS, *ROLLOUT_PEERS)
    add("--trace", nargs="+", type=Path, default=[], metavar="PATH", help="recorded traffic, .npz")
    add(
        "--synthetic",
        nargs="+",
        type=synthetic,
        default=[],
        metavar="copy-edit:N",
        help="copies, each Nth token edited",
    )
    add("--drafter", nargs="+", required=True, choices=names, metavar="NAME", help=", ".join(names))
    add(
        "--k",
        type=list_of(draft_size),
        default=[32],
        help=f"most tokens in a draft, at most {MAX_DRAFT} (32); arctic has its own grid",
    )
    add(
        "--draft-shape",
        type=list_of(shape),
        default=["path", "tree"],
        help="of ssd's drafts: path, tree or path,tree (both)",
    )
    add("--cost", type=list_of(share), default=[0.02], help="cost of one more token as a fraction of a step (0.02)")
    add(
        "--concurrency",
        type=list_of(concurrency),
        default=[1],
        help=f"requests that run at once (1); {BY_VERSION}: all of a version, then all of the next one",
    )
    add("--groups", action="store_true", help="give groups and versions to drafters that use them")
    add(
        "--reads",
        type=Path,
        metavar="PATH",
        help="replay the second half of each trace with ssd, without and with the first half of this one as a library",
    )
    add(
        "--warm",
        action="store_true",
        help="replay twice and show the second time; overstates: in production no answer is known in advance",
    )
    add("--max-output-tokens", type=positive, metavar="N", help="stop after N output tokens of each trace")
    add("--out", type=Path, metavar="FILE", help="file for the results")
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


def shape(text: str) -> str:
    """Parse `path` or `tree`."""
    if text not in ("path", "tree"):
        raise argparse.ArgumentTypeError(f"shapes are path and tree, not {text!r}")
    return text


def synthetic(text: str) -> int:
    """Parse the name of a synthetic trace, and return after how many tokens one is edited."""
    kind, _, every = text.partition(":")
    if kind != "copy-edit":
        raise argparse.ArgumentTypeError(f"{text!r} is not copy-edit:N")
    return positive(every)


def copy_edit(every: int) -> Recording:
    """Return outputs that copy their random prompts, with every `every`-th token replaced."""
    rng = np.random.default_rng(0)
    requests = []
    for session in range(COPIES):
        source = rng.integers(0, VOCABULARY, SOURCE_TOKENS, np.uint32)
        edited = source.copy()
        # Adding 1 to VOCABULARY - 1 modulo the vocabulary gives any other token.
        edited[every - 1 :: every] += rng.integers(1, VOCABULARY, len(edited[every - 1 :: every]), np.uint32)
        requests.append(RecordedRequest(source, edited % VOCABULARY, session))
    return Recording.of(requests, f"copy-edit-{every}")


def halves(recording: Recording) -> tuple[Recording, Recording]:
    """Return two parts with half of the output each: groups and sessions that began earlier, and the others."""
    names = (recording.groups.tolist(), recording.sessions.tolist(), range(len(recording)))
    # A request stays together with its group, else with its session.
    units = [next((kind, name) for kind, name in enumerate(each) if name >= 0) for each in zip(*names, strict=True)]
    sizes, lengths = dict.fromkeys(units, 0), recording.output_lengths.tolist()
    for unit, length in zip(units, lengths, strict=True):
        sizes[unit] += length
    before = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    is_second = np.array([2 * before[unit] >= recording.output_tokens for unit in units])
    return recording.take(np.flatnonzero(~is_second)), recording.take(np.flatnonzero(is_second))


if __name__ == "__main__":
    main()
