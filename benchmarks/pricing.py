"""Measure the throughput of drafts that are chosen by the durations of an engine's steps.

    python -m benchmarks.pricing [--traces build/traces] [--concurrency 1,4,16,64,128,256] [--out FILE]

Replays recorded traffic on simulated engines whose step durations are computed from data sheets: an H100 with a model
of 8B parameters, an H200 with 70B and an L4 with 8B; and the H100 with steps padded to the sizes of CUDA graphs, with
drafts padded to one of a few lengths, and with steps that take twice as long after half of the output. For each trace,
engine and number of requests at once, the throughput of SSD is divided by that of the others:

    none      no drafts
    fixed     SSD with a fixed cost of a draft token and the best of 28 settings in hindsight: path or tree, and 9
              costs with drafts of up to 32 tokens, or 5 smaller lengths with a cost of 0.001
    arctic    Arctic Inference with the best of 24 settings in hindsight
    vllm-ngram, sglang-ngram
              prompt lookup as in vLLM, and the n-gram cache of SGLang, with the best K in hindsight

SSD is told the first durations (known), learns them from reported times with 10 % noise, 1 % of which are also 5 times
too long (learned), or has only its guess for unknown hardware (guessed). Drafting itself takes no time here.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console

from benchmarks.support import Row, list_of, new_parser, positive, report
from benchmarks.support.peers import missing, peer_candidates
from benchmarks.support.replaying import Candidate, new_drafter, options_of, own_candidates, ssd_drafter
from drafter_service.observability.pages.tables import console_table
from engine.commands.progress import LongProgress
from ssd.budget.padding import NO_PADDING, Padding
from ssd.replay import Recording
from ssd.types import StepTime

if TYPE_CHECKING:
    from ssd.budget.curve import StepCurve
    from ssd.replay import Step

GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Numbers of tokens that vLLM captures CUDA graphs for by default."""
PADDED_LENGTHS = (0, 1, 2, 4, 8, 16, 32)
NOISE, OUTLIERS, OUTLIER_FACTOR = 0.1, 0.01, 5.0
"""Relative standard deviation of reported times; share of times that other load makes longer, and their factor."""
COSTS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
SHAPES = ("path", "tree")
MAX_DRAFT = 32
LENGTHS = (1, 2, 4, 8, 16)
"""Values of K that are tried with fixed drafts, beside `MAX_DRAFT`."""
PEER_LENGTHS = (2, 4, 8, 16, 32)
PEERS = ("arctic", "vllm-ngram", "sglang-ngram")
OTHERS = ("none", "fixed", *PEERS)
KNOWN, LEARNED, GUESSED = OWN = ("known", "learned", "guessed")


class SimulatedEngine(NamedTuple):
    """Hardware and a model whose steps have known durations."""

    name: str
    gpu: str
    model_size: str
    padding: Padding = NO_PADDING
    is_slowing: bool = False
    """Whether its steps take twice as long after half of the output."""

    def curve(self) -> StepCurve:
        """Return the durations of its steps, at first."""
        from ssd.budget.curve import StepCurve
        from ssd.budget.roofline import roofline

        return StepCurve.from_profile(roofline(self.gpu, self.model_size), self.padding)


ENGINES = (
    SimulatedEngine("H100, 8B", "h100", "8b"),
    SimulatedEngine("H200, 70B", "h200", "70b"),
    SimulatedEngine("L4, 8B", "l4", "8b"),
    SimulatedEngine("H100, 8B, CUDA graphs", "h100", "8b", Padding(sizes=GRAPH_SIZES)),
    SimulatedEngine("H100, 8B, padded to K", "h100", "8b", Padding(lengths=PADDED_LENGTHS)),
    SimulatedEngine("H100, 8B, slowing by 2x", "h100", "8b", is_slowing=True),
)


class Clock:
    """The durations of the steps of one replay on a simulated engine."""

    def __init__(self, engine: SimulatedEngine, output_tokens: int) -> None:
        self._curve = engine.curve()
        self._duration = functools.cache(lambda tokens, sequences: float(self._curve.seconds(tokens, sequences)))
        self._slow_after = output_tokens / 2 if engine.is_slowing else np.inf
        self._committed = 0
        self.seconds = 0.0
        """Sum over all steps so far."""

    def run(self, step: Step) -> StepTime:
        """Run a step, and return its duration."""
        tokens = self._curve.step_tokens(step.drafted)
        seconds = self._duration(tokens, len(step)) * (2 if self._committed > self._slow_after else 1)
        self._committed += int(step.committed.sum())
        self.seconds += seconds
        return StepTime(tokens, len(step), seconds)


def disturbed(time: StepTime, rng: np.random.Generator) -> StepTime:
    """Return a duration as an engine on a busy machine would report it."""
    factor = max(0.01, 1 + NOISE * rng.standard_normal()) * (OUTLIER_FACTOR if rng.random() < OUTLIERS else 1.0)
    return time._replace(seconds=time.seconds * factor)


class Task(NamedTuple):
    """One replay."""

    trace: Path
    tokens: int
    concurrency: int
    drafter: str
    """One of `OTHERS` or `OWN`."""
    number: int
    """Index of a setting of one of `OTHERS`, or else of an engine in `ENGINES`."""


class Result(NamedTuple):
    """The duration of a replay on each engine; one of SSD's own choices is replayed for one engine only."""

    task: Task
    setting: str
    seconds: dict[str, float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all replays, and print the figures."""
    parser = new_parser("pricing", __doc__)
    add: Any = parser.add_argument
    add("--traces", type=Path, default=Path("build/traces"), metavar="PATH", help="folder or file (build/traces)")
    add("--max-output-tokens", type=positive, default=30_000, metavar="N", help="of each trace (30,000)")
    add("--concurrency", type=list_of(positive), default=[1, 4, 16, 64, 128, 256], help="(1,4,16,64,128,256)")
    add("--jobs", type=positive, default=2, metavar="N", help="replays at a time (2)")
    options = parser.parse_args(arguments)
    paths = sorted(options.traces.glob("*.npz")) if options.traces.is_dir() else [options.traces]
    if not all(path.exists() for path in paths) or not paths:
        parser.error(f"no traces in {options.traces}; make some with python -m benchmarks.traces fetch all")
    console = Console(width=None if sys.stdout.isatty() else 160)
    skipped = {peer: reason for peer in PEERS if (reason := missing(peer))}
    for peer, reason in skipped.items():
        console.print(f"skipped {peer}: {reason}")
    peers = [peer for peer in PEERS if peer not in skipped]
    tasks = [
        Task(path, options.max_output_tokens, count, drafter, number)
        for path, count in itertools.product(paths, options.concurrency)
        for drafter in ("none", "fixed", *peers, *OWN)
        for number in range(len(ENGINES if drafter in OWN else settings_of(drafter)))
    ]
    rows = rows_of(run_all(tasks, options.jobs))
    print_ratios(console, rows, peers)
    report({"command": "python -m benchmarks.pricing", "results": rows}, options.out)


@functools.cache
def settings_of(drafter: str) -> tuple[Candidate, ...]:
    """Return the settings of one of `OTHERS`."""
    if drafter == "none":
        return tuple(own_candidates("none", ()))
    if drafter == "fixed":
        return (
            *own_candidates("ssd", [MAX_DRAFT], SHAPES, COSTS),
            *own_candidates("ssd", LENGTHS, SHAPES, COSTS[:1]),
        )
    return tuple(peer_candidates(drafter, PEER_LENGTHS))


def run_all(tasks: Sequence[Task], jobs: int) -> list[Result]:
    """Run all replays in several processes, with progress on stderr."""
    results: list[Result] = []
    with (
        multiprocessing.get_context("spawn").Pool(jobs) as pool,
        LongProgress(Console(stderr=True), len(tasks), units="replays") as progress,
    ):
        for result in pool.imap_unordered(run, tasks):
            results.append(result)
            progress.advance(1, result.task.trace.stem)
    return results


def run(task: Task) -> Result:
    """Run one replay.

    SSD is told the durations of the engine's steps, learns them from noisy times, or guesses. Other drafters know no
    durations, so one replay has those of all engines.
    """
    from ssd.budget.curve import StepCurve
    from ssd.replay import replay

    recording, is_own = recording_of(task.trace, task.tokens), task.drafter in OWN
    engines = ENGINES[task.number : task.number + 1] if is_own else ENGINES
    if is_own:
        curve = engines[0].curve() if task.drafter == KNOWN else StepCurve.unknown(engines[0].padding)
        candidate = Candidate("ssd", "", lambda size: ssd_drafter(size, MAX_DRAFT, "tree", curve=curve), MAX_DRAFT)
    else:
        candidate = settings_of(task.drafter)[task.number]
    clocks = [Clock(engine, recording.output_tokens) for engine in engines]
    rng = np.random.default_rng(zlib.crc32(f"{task.trace.stem} {task.concurrency} {engines[0].name}".encode()))

    def observe(step: Step) -> None:
        times = [clock.run(step) for clock in clocks]
        step.step_times = (disturbed(times[0], rng),) if task.drafter == LEARNED else ()

    drafter = new_drafter(candidate, recording)
    options = options_of(candidate, drafter, recording)
    replay(recording, drafter, concurrency=task.concurrency, max_draft=candidate.k, options=options, observe=observe)
    setting = candidate.setting if candidate.cost is None else f"{candidate.setting} cost={candidate.cost:g}"
    return Result(task, setting, {one.name: clock.seconds for one, clock in zip(engines, clocks, strict=True)})


@functools.lru_cache(maxsize=2)
def recording_of(path: Path, tokens: int) -> Recording:
    """Return the first requests of a trace, with this number of output tokens."""
    return Recording.load(path).first(tokens)


def rows_of(results: Sequence[Result]) -> list[Row]:
    """Return the seconds of each drafter, with its best setting, by trace, number of requests at once and engine."""
    rows: dict[tuple[str, int, str], Row] = {}
    for task, setting, durations in results:
        for engine, seconds in durations.items():
            key = (task.trace.stem, task.concurrency, engine)
            row = rows.setdefault(key, dict(zip(("trace", "concurrency", "engine"), key, strict=True)))
            if seconds < row.get(task.drafter, np.inf):
                row[task.drafter] = round(seconds, 5)
                if setting:
                    row[f"{task.drafter} setting"] = setting
    order = [engine.name for engine in ENGINES]
    return sorted(rows.values(), key=lambda row: (row["trace"], row["concurrency"], order.index(row["engine"])))


def print_ratios(console: Console, rows: Sequence[Row], peers: Sequence[str]) -> None:
    """Print the throughput of SSD divided by that of the others: geometric mean and least value for each engine."""
    names = [*dict.fromkeys(row["engine"] for row in rows), None]
    for own in OWN:
        others = ["none", "fixed", *peers, *([KNOWN] if own != KNOWN else [])]
        lines = []
        for name in names:
            of_engine = [row for row in rows if name in (None, row["engine"])]
            lines.append([name or "all", *(cell(of_engine, own, other) for other in others)])
        title = f"SSD, durations {own}, / others: geometric mean (least)"
        console.print(console_table(["engine", *others], lines, title=title))


def cell(rows: Sequence[Row], own: str, other: str) -> str:
    """Return a cell of the table."""
    ratios = np.array([row[other] / row[own] for row in rows if other in row])
    return f"{np.exp(np.log(ratios).mean()):.3f} ({ratios.min():.3f})" if len(ratios) else "-"


if __name__ == "__main__":
    main()
