"""The learned tables of a corpus, and the values that they start from.

They start from what other traffic taught: tables learned from public recordings (`benchmarks/priors.py`), which say how
often matches of a length, count and share are right. They contain no tokens. Cells of tokens, and tables for which the
recordings have no evidence, start from formulas.
"""

from __future__ import annotations

import functools
import logging
import zlib
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

import ssd.kernels.probabilities
from ssd.kernels.probabilities import (
    CELL_COUNT,
    FALLBACK_CELLS,
    FALLBACK_PRIOR,
    FALLBACK_START_SEEN,
    FINAL_BUCKETS,
    FINAL_CELLS,
    FINAL_START_SEEN,
    INPUTS,
    MEAN,
    MISS_BUCKETS,
    NOISE_WEIGHTS,
    POINTER_CELLS,
    RUN_BUCKETS,
    SECOND_CELLS,
    SEEN,
    SETS,
    SHARE_BUCKETS,
    START_NOISE_WEIGHTS,
    START_SEEN,
    START_WEIGHTS,
    TOKEN_CELLS,
    TOKEN_SHARES,
    WEIGHT_SETS,
)

logger = logging.getLogger(__name__)

PRIOR_FILE = Path(__file__).with_name("prior.npz")
"""`layout`: `tables_layout()`; `index`, int32 [N]: cells, with `cells`, float32 [N, 2]; `weights`, float32 [SETS,
INPUTS]."""
TYPICAL_COUNTS = (1, 2, 3, 4, 6, 12, 24, 64)
"""A typical count of each bucket of counts."""


class LearnedTables(NamedTuple):
    """The learned tables of a corpus."""

    cells: Annotated[np.ndarray, np.float32, CELL_COUNT, 2]
    logits: Annotated[np.ndarray, np.float32, CELL_COUNT]
    weights: Annotated[np.ndarray, np.float32, WEIGHT_SETS, INPUTS]
    noise_weights: Annotated[np.ndarray, np.float32, NOISE_WEIGHTS]

    @classmethod
    def new(cls) -> LearnedTables:
        """Return tables that start from the prior."""
        cells, logits, weights = (array.copy() for array in start_values(PRIOR_FILE))
        return cls(cells, logits, weights, np.array(START_NOISE_WEIGHTS, np.float32))

    @property
    def nbytes(self) -> int:
        """Memory of all tables."""
        return sum(array.nbytes for array in self)


@functools.cache
def start_values(prior: Path | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the cells, their logits and the weights of new tables; prior: file of learned ones, None for formulas."""
    cells, logits = _formulas()
    weights = np.tile(np.array(START_WEIGHTS, np.float32), (SETS, 1))
    if prior is not None:
        with np.load(prior) as learned:
            if int(learned["layout"]) == tables_layout():
                cells[learned["index"]], weights = learned["cells"], learned["weights"]
                logits[learned["index"]] = _logits(learned["cells"][:, MEAN].astype(np.float64))
            else:
                logger.warning("%s was made for other tables; probabilities start from formulas", prior)
    return cells, logits, np.tile(weights, (WEIGHT_SETS // SETS, 1))


def _formulas() -> tuple[np.ndarray, np.ndarray]:
    """Return the cells that formulas give, float32 [CELL_COUNT, 2], and their logits, float32 [CELL_COUNT]."""
    # A match: its share, moved towards 0.02 / 0.54 by half an occurrence.
    shares, counts = np.append((np.arange(SHARE_BUCKETS - 1) - 0.5) / 11, 1.0), np.array(TYPICAL_COUNTS)[:, None]
    shares[0] = 0.0
    matches = np.repeat((shares * counts + 0.02) / (counts + 0.54), 2)
    # A pointer: more with each correct prediction in a row.
    right = np.repeat((np.arange(RUN_BUCKETS) + 0.5) / (np.arange(RUN_BUCKETS) + 1.5), MISS_BUCKETS)
    tables = {
        0: (matches, START_SEEN),
        POINTER_CELLS: (np.stack([1 - right, right], 1).ravel(), START_SEEN),
        TOKEN_CELLS: ((np.arange(TOKEN_SHARES) + 0.5) / TOKEN_SHARES, START_SEEN),
        FINAL_CELLS: (1 / (1 + np.exp(8 - np.arange(FINAL_BUCKETS) / 2)), FINAL_START_SEEN),
        FALLBACK_CELLS: (np.array([FALLBACK_PRIOR]), FALLBACK_START_SEEN),
        SECOND_CELLS: (matches, START_SEEN),
    }
    cells, means = np.empty((CELL_COUNT, 2), np.float32), np.empty(CELL_COUNT)
    for first, (values, seen) in tables.items():  # Each fills the cells up to those of the next one.
        means[first:] = np.resize(values, CELL_COUNT - first)
        cells[first:, SEEN] = seen
    cells[:, MEAN] = means
    return cells, _logits(means)


def _logits(means: np.ndarray) -> np.ndarray:
    """Return the logits of probabilities, bounded, float32 [N]."""
    return np.clip(np.log(means / (1 - means)), -6.9, 6.9).astype(np.float32)


def tables_layout() -> int:
    """Return a checksum of the sizes and buckets that define the meaning of cells and weights, and of their names."""
    named = sorted(vars(ssd.kernels.probabilities).items())
    sizes = [(name, value) for name, value in named if name.isupper() and isinstance(value, int)]
    buckets = b"".join(value.tobytes() for name, value in named if name.isupper() and isinstance(value, np.ndarray))
    return zlib.crc32(repr(sizes).encode() + buckets)
