"""Bootstrap intervals of geometric means over recordings.

Blocks of consecutive requests of each recording are drawn with replacement, the same ones for all drafters, so that a
ratio of two drafters is one of the same requests. What a block's drafts had learned before is not drawn again.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from benchmarks.support.scores import Row

DRAWS = 2000
SHARE = 0.95
"""Share of the draws within an interval."""


def interval_of_s(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the interval of the geometric mean of S; rows: one of each recording, with `blocks`."""
    return _bounds([drawn(row) for row in rows])


def interval_of_ratio(rows: Sequence[Row], others: Sequence[Row]) -> tuple[float, float]:
    """Return the interval of the geometric mean of S / S of the other row of the same recording."""
    of_trace = {row["trace"]: row for row in others}
    return _bounds([drawn(row) / drawn(of_trace[row["trace"]]) for row in rows])


def drawn(row: Row) -> np.ndarray:
    """Return S of draws of a row's blocks, float64 [DRAWS]; rows of one recording share the draws."""
    tokens, steps, drafted = np.array(row["blocks"])
    generator = np.random.default_rng(zlib.crc32(row["trace"].encode()))
    chosen = generator.integers(0, len(tokens), (DRAWS, len(tokens)))
    return tokens[chosen].sum(axis=1) / (steps[chosen] + row["cost"] * drafted[chosen]).sum(axis=1)


def _bounds(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the interval of the geometric mean of recordings' values, each float64 [DRAWS]."""
    means = np.exp(np.mean(np.log(values), axis=0))
    low, high = np.quantile(means, ((1 - SHARE) / 2, (1 + SHARE) / 2))
    return float(low), float(high)
