"""The learned tables of a corpus, and the values that they start from.

They start from what other traffic taught: tables learned from public recordings (`benchmarks/priors.py`), which say how
often matches of a length, count and share are right. They contain no tokens. Cells of tokens, and tables for which the
recordings have no evidence, start from formulas (`ssd.kernels.probabilities.fill_prior`).
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
    INPUTS,
    MEAN,
    NOISE_WEIGHTS,
    SETS,
    START_NOISE_WEIGHTS,
    START_WEIGHTS,
    WEIGHT_SETS,
    fill_prior,
    logit,
)

logger = logging.getLogger(__name__)

PRIOR_FILE = Path(__file__).with_name("prior.npz")
"""`layout`: `tables_layout()`; `index`, int32 [N]: cells, with `cells`, float32 [N, 2]; `weights`, float32 [SETS,
INPUTS]."""


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
    cells, logits = np.zeros((CELL_COUNT, 2), np.float32), np.zeros(CELL_COUNT, np.float32)
    fill_prior(cells, logits)
    weights = np.tile(np.array(START_WEIGHTS, np.float32), (SETS, 1))
    if prior is not None:
        with np.load(prior) as learned:
            if int(learned["layout"]) == tables_layout():
                cells[learned["index"]], weights = learned["cells"], learned["weights"]
                # A call of the helper itself would compile it, at the first start after `precompile`.
                logits[learned["index"]] = [logit.py_func(mean) for mean in learned["cells"][:, MEAN].tolist()]
            else:
                logger.warning("%s was made for other tables; probabilities start from formulas", prior)
    return cells, logits, np.tile(weights, (WEIGHT_SETS // SETS, 1))


def tables_layout() -> int:
    """Return a checksum of the sizes and buckets that define the meaning of cells and weights, and of their names."""
    named = sorted(vars(ssd.kernels.probabilities).items())
    sizes = [(name, value) for name, value in named if name.isupper() and isinstance(value, int)]
    buckets = b"".join(value.tobytes() for name, value in named if name.isupper() and isinstance(value, np.ndarray))
    return zlib.crc32(repr(sizes).encode() + buckets)
