"""Statistics of drafts and their acceptance: arrays of counters that the kernel adds to."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from ssd.kernels.arrays import allocate
from ssd.kernels.jit import inline
from ssd.sequences.tables import AGE, DEPTH, FALLBACK, LIBRARY, PATH_PROB, SOURCE

POSITIONS = 129
AGES = 40
"""Number of ages with separate counters: the number of bits of an age in tokens."""
PROB_BINS = 20
MAX_VERSIONS = 16
"""Number of versions with separate totals: those whose rollouts ended last."""
SOURCE_COUNT = 4
"""Number of values of `ssd.types.Source`."""

# Columns of `steps`.
STEPS, COMMITTED, HITS = range(3)
# Columns of the tallies.
VERIFIED, ACCEPTED = range(2)
# Columns of the calibration.
COUNT, PREDICTED, OBSERVED = range(3)


class Counters(NamedTuple):
    """The counters, as arguments of kernels."""

    steps: Annotated[np.ndarray, np.int64, 3]
    """Sequence steps, committed tokens, steps in which draft tokens were verified."""
    by_source: Annotated[np.ndarray, np.int64, SOURCE_COUNT, 2]
    """By `Source`: tokens verified, and accepted."""
    by_position: Annotated[np.ndarray, np.int64, POSITIONS, 2]
    """By position in the draft, from 0; in a tree, by depth."""
    by_age: Annotated[np.ndarray, np.int64, AGES, 2]
    """By log2 of the age of the text that the token came from, in tokens; not for tokens of libraries and fallback
    tokens."""
    calibration: Annotated[np.ndarray, np.float64, PROB_BINS, 3]
    """By path probability: tokens verified, sum of path probabilities, tokens accepted."""


@inline
def _tally(table, at, accepted):  # type: ignore[no-untyped-def]
    at = min(np.int64(at), len(table) - 1)
    table[at, VERIFIED] += 1
    table[at, ACCEPTED] += 1 if accepted else 0


@inline
def record_node(counters, node, probs, accepted):  # type: ignore[no-untyped-def]
    """Count one verified draft token."""
    _tally(counters.by_source, node[SOURCE], accepted)
    _tally(counters.by_position, node[DEPTH] - 1, accepted)
    if node[SOURCE] not in (FALLBACK, LIBRARY):
        _tally(counters.by_age, node[AGE], accepted)
    at = min(int(probs[PATH_PROB] * PROB_BINS), PROB_BINS - 1)
    counters.calibration[at, COUNT] += 1.0
    counters.calibration[at, PREDICTED] += probs[PATH_PROB]
    counters.calibration[at, OBSERVED] += 1.0 if accepted else 0.0


class VersionTotals(NamedTuple):
    """Totals of the rollouts of one version that have ended."""

    requests: int = 0
    steps: int = 0
    committed: int = 0
    verified: int = 0
    accepted: int = 0
    ended_at: float = 0.0
    """Time of `time.monotonic` at which the last one ended."""

    def plus(self, other: VersionTotals) -> VersionTotals:
        """Return the sums, and the later end."""
        return VersionTotals(
            self.requests + other.requests,
            self.steps + other.steps,
            self.committed + other.committed,
            self.verified + other.verified,
            self.accepted + other.accepted,
            max(self.ended_at, other.ended_at),
        )


class Stats:
    """Counters of a drafter. Only tokens that the target verified count as drafted."""

    def __init__(self) -> None:
        self.counters = allocate(Counters)
        self.by_version: dict[int, VersionTotals] = {}
        """By version of the policy, at most `MAX_VERSIONS`. Snapshots do not have them."""

    def record_path(self, committed: int, verified: int, accepted: int, steps: int = 1) -> None:
        """Add steps of a drafter of paths; the first one verified `verified` draft tokens and accepted `accepted`."""
        self.counters.steps[:] += (steps, committed, verified > 0)
        self.counters.by_source[0] += (verified, accepted)
        for column, upto in ((VERIFIED, verified), (ACCEPTED, accepted)):
            self.counters.by_position[:upto, column] += 1

    def record_version(self, version: int, totals: VersionTotals) -> None:
        """Add totals of rollouts of one version; the version whose rollouts ended first may lose its totals."""
        self.by_version[version] = self.by_version.get(version, VersionTotals()).plus(totals)
        if len(self.by_version) > MAX_VERSIONS:
            del self.by_version[min(self.by_version, key=lambda each: self.by_version[each].ended_at)]

    def add(self, other: Stats) -> None:
        """Add the counts of another drafter."""
        for own, more in zip(self.counters, other.counters, strict=True):
            own += more
        for version, totals in other.by_version.items():
            self.record_version(version, totals)

    @property
    def steps(self) -> int:
        """Sequence steps, with or without a draft."""
        return int(self.counters.steps[STEPS])

    @property
    def committed(self) -> int:
        """Committed tokens, over all sequences."""
        return int(self.counters.steps[COMMITTED])

    @property
    def hits(self) -> int:
        """Sequence steps in which draft tokens were verified."""
        return int(self.counters.steps[HITS])

    @property
    def verified(self) -> int:
        """Draft tokens that the target verified."""
        return int(self.counters.by_source[:, VERIFIED].sum())

    @property
    def accepted(self) -> int:
        """Draft tokens that the target accepted."""
        return int(self.counters.by_source[:, ACCEPTED].sum())

    @property
    def nbytes(self) -> int:
        """Memory of the counters."""
        return sum(array.nbytes for array in self.counters)
