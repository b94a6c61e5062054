"""Counters of what was drafted and what became of it: flat arrays that the kernel adds to, always on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ssd.kernels.jit import inline
from ssd.sequences.tables import AGE, DEPTH, LENGTH, PATH_ODDS, SOURCE

LENGTHS = 65
"""Match lengths counted apart; longer ones with the last."""
POSITIONS = 129
AGES = 40
"""Ages in tokens, by the number of their bits."""
ODDS_BINS = 20

# Columns of `steps`.
STEPS, COMMITTED, HITS = range(3)
# Columns of the tallies.
VERIFIED, ACCEPTED = range(2)
# Columns of the calibration.
COUNT, PROMISED, KEPT_COUNT = range(3)


class Counters(NamedTuple):
    """The arrays, as kernels take them."""

    steps: np.ndarray
    """int64 [3]: sequence steps, tokens that the target produced, steps in which something was verified."""
    by_source: np.ndarray
    """int64 [2, 2]: by `Source`: tokens verified, and accepted."""
    by_length: np.ndarray
    """int64 [LENGTHS, 2]: by match length."""
    by_position: np.ndarray
    """int64 [POSITIONS, 2]: by position in the draft, from 0; in a tree, by depth."""
    by_age: np.ndarray
    """int64 [AGES, 2]: by log2 of the age of the text that the token came from, in tokens."""
    calibration: np.ndarray
    """float64 [ODDS_BINS, 3]: by path odds: tokens verified, the sum of their path odds, and accepted."""


@inline
def _tally(table, at, accepted):  # type: ignore[no-untyped-def]
    at = min(np.int64(at), len(table) - 1)
    table[at, VERIFIED] += 1
    table[at, ACCEPTED] += 1 if accepted else 0


@inline
def record_node(counters, node, odds, accepted):  # type: ignore[no-untyped-def]
    """Count one verified draft token."""
    _tally(counters.by_source, node[SOURCE], accepted)
    _tally(counters.by_length, node[LENGTH], accepted)
    _tally(counters.by_position, node[DEPTH] - 1, accepted)
    _tally(counters.by_age, node[AGE], accepted)
    at = min(int(odds[PATH_ODDS] * ODDS_BINS), ODDS_BINS - 1)
    counters.calibration[at, COUNT] += 1.0
    counters.calibration[at, PROMISED] += odds[PATH_ODDS]
    counters.calibration[at, KEPT_COUNT] += 1.0 if accepted else 0.0


class Stats:
    """Counters since a drafter began. Only tokens that the target verified count as drafted."""

    def __init__(self) -> None:
        self.counters = Counters(
            np.zeros(3, np.int64),
            np.zeros((2, 2), np.int64),
            np.zeros((LENGTHS, 2), np.int64),
            np.zeros((POSITIONS, 2), np.int64),
            np.zeros((AGES, 2), np.int64),
            np.zeros((ODDS_BINS, 3), np.float64),
        )
        self._arrays = tuple(self.counters)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The counters, in their order."""
        return self._arrays

    def record_path(self, committed: int, verified: int, accepted: int, steps: int = 1) -> None:
        """Note some steps of a drafter that knows nothing but paths; verified was in the first of them."""
        self.counters.steps[:] += (steps, committed, verified > 0)
        self.counters.by_source[0] += (verified, accepted)
        for column, upto in ((VERIFIED, verified), (ACCEPTED, accepted)):
            self.counters.by_position[:upto, column] += 1

    @property
    def steps(self) -> int:
        """Sequence steps, with or without a draft."""
        return int(self.counters.steps[STEPS])

    @property
    def committed(self) -> int:
        """Tokens that the target produced, over all sequences."""
        return int(self.counters.steps[COMMITTED])

    @property
    def hits(self) -> int:
        """Sequence steps for which something was drafted and verified."""
        return int(self.counters.steps[HITS])

    @property
    def verified(self) -> int:
        """Draft tokens that the target verified."""
        return int(self.counters.by_source[:, VERIFIED].sum())

    @property
    def accepted(self) -> int:
        """Draft tokens that it kept."""
        return int(self.counters.by_source[:, ACCEPTED].sum())

    def calibration_error(self) -> float:
        """The mean difference between the odds of a path and how often such paths were accepted, over all tokens."""
        table = self.counters.calibration
        return float(np.abs(table[:, PROMISED] - table[:, KEPT_COUNT]).sum() / max(1.0, table[:, COUNT].sum()))

    def summary(self) -> Mapping[str, float]:
        """The figures that people ask for first."""
        return {
            "hit_rate": self.hits / max(1, self.steps),
            "drafted": self.verified,
            "accepted": self.accepted,
            "acceptance": self.accepted / max(1, self.verified),
            "tokens_per_step": self.committed / max(1, self.steps),
        }

    @property
    def nbytes(self) -> int:
        """Memory of the counters."""
        return sum(array.nbytes for array in self.counters)
