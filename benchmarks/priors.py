"""Learn the values that a new corpus's tables start from, and measure what they gain.

    python -m benchmarks.priors [--traces build/traces] [--out ssd/kernels/prior.npz]
    python -m benchmarks.priors --leave-one-out [--tokens 1000,5000,40000] [--out FILE]

Each recording is replayed from an empty corpus with tables that start from formulas, as paths and as trees and with
several costs of a token. What the tables learned in all replays is added up: for each cell the mean of its outcomes,
which then counts as at most 60 outcomes, and the mean of the weights. Cells of tokens, of pairs of tokens and of the
final correction are left out, because they depend on the recording. `python -m benchmarks.traces fetch all` makes the
recordings.

With --leave-one-out, each recording is replayed with what the others taught, from several of its requests on, and S
(see `benchmarks.replay`) and the calibration error are compared with those of tables that start from formulas.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from benchmarks.support.command import list_of, new_parser, positive, print_document
from benchmarks.support.drafters import own_candidates
from benchmarks.support.scores import figures
from benchmarks.traces import Trace, load_trace
from drafter_service.observability.pages.tables import console_table

LEARNED = (("path", 0.02), ("path", 0.1), ("tree", 0.005), ("tree", 0.05))
"""Shapes and costs that the tables learn with."""
MEASURED = (("path", 0.02), ("path", 0.1), ("tree", 0.005), ("tree", 0.02), ("tree", 0.1))
PRIOR = Path("ssd/kernels/prior.npz")
MAX_DRAFT = 32
LEARNED_TOKENS = 40_000
"""Output tokens of each recording that the tables learn from."""
MOST_SEEN = 60.0
"""Largest number of outcomes that a cell starts with; 5 to 250 were tried, and 20 to 250 do not differ."""
WINDOWS = ((5_000, (0.0, 0.33, 0.66)), (40_000, (0.0, 0.4)))
"""Where replays of less than a number of tokens begin, as fractions of a recording's requests; others at 0."""

Tables = tuple[np.ndarray, np.ndarray]
"""Cells and weights."""


class Task(NamedTuple):
    """One replay."""

    trace: Path
    shape: str
    cost: float
    tokens: int
    start: float = 0.0
    tables: Tables | None = None
    """Values that the tables start from; None: formulas."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Learn from all recordings, and write or measure the result."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    paths = sorted(options.traces.glob("*.npz"))
    if not paths:
        parser.error(f"no traces in {options.traces}; make some with python -m benchmarks.traces fetch all")
    with ProcessPoolExecutor(options.jobs) as pool:
        tasks = [Task(path, *setting, LEARNED_TOKENS) for path in paths for setting in LEARNED]
        learned = dict(zip(tasks, pool.map(learn, tasks), strict=True))
        if not options.leave_one_out:
            write(pooled(list(learned.values())), options.out or PRIOR)
            return
        rows = []
        for tokens in options.tokens:
            rows += measure_all(pool, paths, learned, tokens)
            print_gains([row for row in rows if row["tokens"] == tokens], tokens)
    print_document({"command": "python -m benchmarks.priors --leave-one-out", "results": rows}, options.out)


def learn(task: Task) -> Tables:
    """Return the cells and weights after a replay."""
    drafter, _ = replayed(task)
    return drafter.corpus.learned.cells, drafter.corpus.learned.weights


def measure(task: Task) -> dict[str, Any]:
    """Return S and the calibration error of a replay."""
    _, tally = replayed(task)
    found = figures(tally, task.cost)
    return {"S": found["S"], "ece": found["ece_all"]}


def replayed(task: Task) -> tuple[Any, Any]:
    """Replay the first tokens of a recording, from a fraction of its requests on; return the drafter and the tally."""
    from benchmarks.support.replaying import replay
    from ssd.kernels.learned import start_values

    trace = load_trace(task.trace)
    trace = Trace(trace.name, trace.requests[int(task.start * len(trace.requests)) :]).first(task.tokens)
    [candidate] = own_candidates("ssd", [MAX_DRAFT], [task.shape], [task.cost])
    drafter = candidate.build(trace.traffic())
    cells, logits, weights = start_values(None)
    if task.tables is not None:
        cells, weights = task.tables
        logits = np.log(cells[:, 0] / (1 - cells[:, 0])).clip(-6.9, 6.9)
    for own, start in zip(drafter.corpus.learned.arrays, (cells, logits, weights), strict=False):
        own[:] = start
    return drafter, replay(candidate, trace, drafter=drafter)


def pooled(learned: Sequence[Tables]) -> Tables:
    """Return the tables that contain what all `learned` ones contain beyond the formulas."""
    from ssd.kernels.learned import start_values
    from ssd.kernels.probabilities import FALLBACK_CELLS, MEAN, SECOND_CELLS, SEEN, SETS, TOKEN_CELLS, WEIGHT_SETS

    start, _, _ = start_values(None)
    first_seen = start[:, SEEN].astype(float)
    seen, right = first_seen.copy(), first_seen * start[:, MEAN]
    for cells, _ in learned:
        seen += cells[:, SEEN] - first_seen
        right += cells[:, SEEN] * cells[:, MEAN] - first_seen * start[:, MEAN]
    result = start.copy()
    for kept in (slice(0, TOKEN_CELLS), slice(FALLBACK_CELLS, SECOND_CELLS)):
        result[kept, MEAN] = np.clip(right[kept] / seen[kept], 1e-4, 1 - 1e-4)
        result[kept, SEEN] = np.clip(seen[kept], first_seen[kept], np.maximum(MOST_SEEN, first_seen[kept]))
    # Recordings without groups and libraries only change the first sets.
    weights = np.mean([each[:SETS] for _, each in learned], axis=0)
    return result, np.tile(weights, (WEIGHT_SETS // SETS, 1))


def write(tables: Tables, path: Path) -> None:
    """Write the cells that differ from the formulas, and the weights of a set."""
    from ssd.kernels.learned import start_values, tables_layout
    from ssd.kernels.probabilities import SETS

    cells, weights = tables
    index = np.flatnonzero((cells != start_values(None)[0]).any(axis=1)).astype(np.int32)
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(
        path, layout=np.int64(tables_layout()), index=index, cells=cells[index], weights=weights[:SETS].astype("f4")
    )
    print(f"{path}: {len(index)} cells, {path.stat().st_size:,} bytes")


def measure_all(
    pool: ProcessPoolExecutor, paths: Sequence[Path], learned: dict[Task, Tables], tokens: int
) -> list[dict[str, Any]]:
    """Replay each recording with formulas and with what the others taught; return a row for each setting and start."""
    starts: tuple[float, ...] = next((starts for most, starts in WINDOWS if tokens < most), (0.0,))
    taught = {path: pooled([tables for task, tables in learned.items() if task.trace != path]) for path in paths}
    plain = [Task(path, *setting, tokens, start) for path, setting, start in itertools.product(paths, MEASURED, starts)]
    before = pool.map(measure, plain)
    after = pool.map(measure, (task._replace(tables=taught[task.trace]) for task in plain))
    return [
        {
            "trace": task.trace.stem,
            "shape": task.shape,
            "cost": task.cost,
            "tokens": tokens,
            "start": task.start,
            "S_formulas": old["S"],
            "S": new["S"],
            "ece_formulas": old["ece"],
            "ece": new["ece"],
        }
        for task, old, new in zip(plain, before, after, strict=True)
    ]


def print_gains(rows: Sequence[dict[str, Any]], tokens: int) -> None:
    """Print the geometric mean and the least of the gains for each shape and cost."""
    lines = []
    for shape, cost in (*MEASURED, ("all", None)):
        of_setting = [row for row in rows if cost is None or (row["shape"], row["cost"]) == (shape, cost)]
        gains = np.array([row["S"] / row["S_formulas"] for row in of_setting])
        errors = [f"{np.mean([row[name] or 0.0 for row in of_setting]):.4f}" for name in ("ece", "ece_formulas")]
        cells = (f"{np.exp(np.log(gains).mean()):.4f}", f"{gains.min():.3f}", *errors)
        lines.append((shape, "" if cost is None else f"{cost:g}", *cells))
    heads = ("shape", "cost", "S / formulas", "least", "calibration error", "formulas")
    Console().print(console_table(heads, lines, title=f"{tokens:,} tokens"))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("priors", __doc__)
    add: Any = parser.add_argument
    add("--traces", type=Path, default=Path("build/traces"), metavar="FOLDER", help="recordings (build/traces)")
    add("--leave-one-out", action="store_true", help="measure instead of writing the file")
    add("--tokens", type=list_of(positive), default=[1000, 5000, 40_000], help="output tokens (1000,5000,40000)")
    add("--jobs", type=positive, default=2, metavar="N", help="replays at a time (2)")
    add("--out", type=Path, metavar="FILE", help=f"file to write ({PRIOR}; with --leave-one-out none)")
    return parser


if __name__ == "__main__":
    main()
