"""Learn the values that a new corpus's tables start from.

    python -m benchmarks.priors [--traces build/traces] [--out ssd/kernels/prior.npz]
    python -m benchmarks.priors --without NAME [--out build/priors/without-NAME.npz]

Each recording is replayed from an empty corpus with tables that start from formulas, as paths and as trees and with
several costs of a token. What the tables learned in all replays is added up: for each cell the mean of its outcomes,
which then counts as at most 60 outcomes, and the mean of the weights. Cells of tokens, of pairs of tokens and of the
final correction are left out, because they depend on the recording. `python -m benchmarks.traces fetch all` makes the
recordings; those that `benchmarks/traces/manifest.json` marks with `"teaches": false` are held out. --without holds
out another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.support import ROOT, new_parser, positive
from benchmarks.support.replaying import PRIOR, new_drafter, own_candidates, replay
from benchmarks.traces import load_manifest
from ssd.replay import Recording

LEARNED = (("path", 0.02), ("path", 0.1), ("tree", 0.005), ("tree", 0.05))
"""Shapes and costs that the tables learn with."""
LEFT_OUT = ROOT / "build" / "priors"
"""Folder for start values that were made without a recording."""
MAX_DRAFT = 32
LEARNED_TOKENS = 40_000
"""Output tokens of each recording that the tables learn from."""
MOST_SEEN = 60.0
"""Largest number of outcomes that a cell starts with; 5 to 250 were tried, and 20 to 250 do not differ."""

Tables = tuple[np.ndarray, np.ndarray]
"""Cells and weights."""
Learned = dict[str, list[Tables]]
"""What each recording taught, in the order of `LEARNED`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Learn from all recordings, and write the result."""
    parser = new_parser("priors", __doc__)
    parser.add_argument("--traces", type=Path, default=Path("build/traces"), help="folder of recordings (build/traces)")
    parser.add_argument("--without", metavar="NAME", help="recording that nothing is learned from")
    parser.add_argument("--jobs", type=positive, default=2, metavar="N", help="replays at a time (2)")
    options = parser.parse_args(arguments)
    try:
        teachers = teachers_in(options.traces)
        if options.without and options.without not in teachers:
            raise ValueError(f"{options.without} is not one of {', '.join(teachers)}")
    except ValueError as error:
        parser.error(str(error))
    with ProcessPoolExecutor(options.jobs) as pool:
        learned = learn_all(teachers, pool.map)
    default = LEFT_OUT / f"without-{options.without}.npz" if options.without else PRIOR
    write(pooled(learned, options.without), options.out or default)


def teacher_names() -> list[str]:
    """Return the names of the recordings that the shipped values are learned from."""
    return sorted(name for name, source in load_manifest().items() if source["teaches"])


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
    paths = [path for path in teachers.values() for _ in LEARNED]
    tables = list(run(learn, paths, LEARNED * len(teachers)))
    return {name: tables[at * len(LEARNED) : (at + 1) * len(LEARNED)] for at, name in enumerate(teachers)}


def learn(trace: Path, setting: tuple[str, float]) -> Tables:
    """Return the cells and weights after a replay; setting: shape and cost."""
    shape, cost = setting
    recording = Recording.load(trace).first(LEARNED_TOKENS)
    [candidate] = own_candidates("ssd", [MAX_DRAFT], [shape], [cost], prior=None)
    drafter = new_drafter(candidate, recording)
    replay(candidate, recording, drafter=drafter)
    return drafter.corpus.learned.cells, drafter.corpus.learned.weights


def write_left_out(learned: Learned) -> dict[str, Path]:
    """Write start values without each recording, and return the files by the name of the one that was left out."""
    files = {name: LEFT_OUT / f"without-{name}.npz" for name in learned}
    for name, path in files.items():
        write(pooled(learned, name), path)
    return files


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


if __name__ == "__main__":
    main()
