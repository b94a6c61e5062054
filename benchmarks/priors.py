"""Learn the values that a new corpus's tables start from, and measure what they gain.

    python -m benchmarks.priors [--traces build/traces] [--out ssd/kernels/prior.npz]
    python -m benchmarks.priors --without NAME [--out build/priors/without-NAME.npz]
    python -m benchmarks.priors --leave-one-out [--tokens 1000,5000,40000] [--out FILE]

Each recording is replayed from an empty corpus with tables that start from formulas, as paths and as trees and with
several costs of a token. What the tables learned in all replays is added up: for each cell the mean of its outcomes,
which then counts as at most 60 outcomes, and the mean of the weights. Cells of tokens, of pairs of tokens and of the
final correction are left out, because they depend on the recording. `python -m benchmarks.traces fetch all` makes the
recordings; those that `benchmarks/traces/manifest.json` marks with `"teaches": false` are held out. --without holds
out another one.

With --leave-one-out, each recording of the folder is replayed with what the others taught, from several of its
requests on, and S (see `benchmarks.replay`) and the calibration error are compared with those of tables that start from
formulas.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from benchmarks.support.command import ROOT, list_of, new_parser, positive, print_document
from benchmarks.support.drafters import own_candidates, starting_from
from benchmarks.support.scores import figures
from benchmarks.traces import Trace, load_trace
from benchmarks.traces.fetching import load_manifest
from drafter_service.observability.pages.tables import console_table

LEARNED = (("path", 0.02), ("path", 0.1), ("tree", 0.005), ("tree", 0.05))
"""Shapes and costs that the tables learn with."""
MEASURED = (("path", 0.02), ("path", 0.1), ("tree", 0.005), ("tree", 0.02), ("tree", 0.1))
PRIOR = ROOT / "ssd" / "kernels" / "prior.npz"
LEFT_OUT = ROOT / "build" / "priors"
"""Folder for start values that were made without a recording."""
MAX_DRAFT = 32
LEARNED_TOKENS = 40_000
"""Output tokens of each recording that the tables learn from."""
MOST_SEEN = 60.0
"""Largest number of outcomes that a cell starts with; 5 to 250 were tried, and 20 to 250 do not differ."""
WINDOWS = ((5_000, (0.0, 0.33, 0.66)), (40_000, (0.0, 0.4)))
"""Where replays of less than a number of tokens begin, as fractions of a recording's requests; others at 0."""

Tables = tuple[np.ndarray, np.ndarray]
"""Cells and weights."""
Learned = dict[str, list[Tables]]
"""What each recording taught, in the order of `LEARNED`."""


class Task(NamedTuple):
    """One replay."""

    trace: Path
    shape: str
    cost: float
    tokens: int
    start: float = 0.0
    prior: Path | None = None
    """File of the values that the tables start from; None: formulas."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Learn from all recordings, and write or measure the result."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        teachers = teachers_in(options.traces)
        if options.without and options.without not in teachers:
            raise ValueError(f"{options.without} is not one of {', '.join(teachers)}")
    except ValueError as error:
        parser.error(str(error))
    with ProcessPoolExecutor(options.jobs) as pool:
        learned = learn_all(teachers, pool.map)
        if not options.leave_one_out:
            default = left_out_file(options.without) if options.without else PRIOR
            write(pooled(learned, options.without), options.out or default)
            return
        rows, left_out = [], write_left_out(learned)
        for tokens in options.tokens:
            rows += measure_all(pool, sorted(options.traces.glob("*.npz")), left_out, tokens)
            print_gains([row for row in rows if row["tokens"] == tokens], tokens)
    print_document({"command": "python -m benchmarks.priors --leave-one-out", "results": rows}, options.out)


def teacher_names() -> list[str]:
    """Return the names of the recordings that the shipped values are learned from."""
    return sorted(name for name, source in load_manifest().items() if source.teaches)


def teachers_in(folder: Path) -> dict[str, Path]:
    """Return the recordings that the shipped values are learned from, by name. Raises ValueError if one is missing."""
    paths = {name: folder / f"{name}.npz" for name in teacher_names()}
    if missing := [name for name, path in paths.items() if not path.exists()]:
        raise ValueError(
            f"{folder} does not have {', '.join(missing)}, which start values are learned from; make what is missing"
            f" with python -m benchmarks.traces fetch {' '.join(missing)} --folder {folder}"
        )
    return paths


def learn_all(teachers: Mapping[str, Path], run: Callable[..., Iterable[Tables]] = map) -> Learned:
    """Replay recordings, and return what the tables learned from each, by name; run: `map` of a pool of processes."""
    tasks = [Task(path, *setting, LEARNED_TOKENS) for path in teachers.values() for setting in LEARNED]
    tables = list(run(learn, tasks))
    return {name: tables[at * len(LEARNED) : (at + 1) * len(LEARNED)] for at, name in enumerate(teachers)}


def left_out_file(name: str) -> Path:
    """Return the file of the values that are learned without a recording."""
    return LEFT_OUT / f"without-{name}.npz"


def write_left_out(learned: Learned) -> dict[str, Path]:
    """Write start values without each recording, and return the files by the name of the one that was left out."""
    files = {name: left_out_file(name) for name in learned}
    for name, path in files.items():
        write(pooled(learned, name), path)
    return files


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

    trace = load_trace(task.trace)
    trace = Trace(trace.name, trace.requests[int(task.start * len(trace.requests)) :]).first(task.tokens)
    [candidate] = own_candidates("ssd", [MAX_DRAFT], [task.shape], [task.cost])
    drafter = starting_from(candidate, task.prior).build(trace.traffic())
    return drafter, replay(candidate, trace, drafter=drafter)


def pooled(learned: Learned, without: str | None = None) -> Tables:
    """Return the tables that contain what those of all recordings but `without` contain beyond the formulas."""
    from ssd.kernels.learned import start_values
    from ssd.kernels.probabilities import FALLBACK_CELLS, MEAN, SECOND_CELLS, SEEN, SETS, TOKEN_CELLS, WEIGHT_SETS

    start, _, _ = start_values(None)
    first_seen = start[:, SEEN].astype(float)
    seen, right = first_seen.copy(), first_seen * start[:, MEAN]
    kept_tables = [tables for name, of_name in learned.items() if name != without for tables in of_name]
    for cells, _ in kept_tables:
        seen += cells[:, SEEN] - first_seen
        right += cells[:, SEEN] * cells[:, MEAN] - first_seen * start[:, MEAN]
    result = start.copy()
    for kept in (slice(0, TOKEN_CELLS), slice(FALLBACK_CELLS, SECOND_CELLS)):
        result[kept, MEAN] = np.clip(right[kept] / seen[kept], 1e-4, 1 - 1e-4)
        result[kept, SEEN] = np.clip(seen[kept], first_seen[kept], np.maximum(MOST_SEEN, first_seen[kept]))
    # Recordings without groups and libraries only change the first sets.
    weights = np.mean([each[:SETS] for _, each in kept_tables], axis=0)
    return result, np.tile(weights, (WEIGHT_SETS // SETS, 1))


def write(tables: Tables, path: Path) -> None:
    """Write the cells that differ from the formulas, and the weights of a set."""
    from ssd.kernels.learned import start_values, tables_layout
    from ssd.kernels.probabilities import SETS

    cells, weights = tables
    index = np.flatnonzero((cells != start_values(None)[0]).any(axis=1)).astype(np.int32)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path, layout=np.int64(tables_layout()), index=index, cells=cells[index], weights=weights[:SETS].astype("f4")
    )
    print(f"{path}: {len(index)} cells, {path.stat().st_size:,} bytes")


def measure_all(
    pool: ProcessPoolExecutor, paths: Sequence[Path], left_out: Mapping[str, Path], tokens: int
) -> list[dict[str, Any]]:
    """Replay each recording with formulas and with what the others taught; return a row for each setting and start.

    left_out: see `write_left_out`; other recordings start from the shipped values.
    """
    starts: tuple[float, ...] = next((starts for most, starts in WINDOWS if tokens < most), (0.0,))
    plain = [Task(path, *setting, tokens, start) for path, setting, start in itertools.product(paths, MEASURED, starts)]
    before = pool.map(measure, plain)
    after = pool.map(measure, (task._replace(prior=left_out.get(task.trace.stem, PRIOR)) for task in plain))
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
    add("--without", metavar="NAME", help="recording that nothing is learned from")
    add("--leave-one-out", action="store_true", help="measure instead of writing the file")
    add("--tokens", type=list_of(positive), default=[1000, 5000, 40_000], help="output tokens (1000,5000,40000)")
    add("--jobs", type=positive, default=2, metavar="N", help="replays at a time (2)")
    add("--out", type=Path, metavar="FILE", help="file to write; --leave-one-out: for the results, none by default")
    return parser


if __name__ == "__main__":
    main()
