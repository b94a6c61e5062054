"""How long something takes, as a histogram that costs a fraction of a microsecond to add to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

BOUNDS_S = tuple(1e-5 * 2 ** (step / 2) for step in range(41))
"""Upper bounds of the bins in seconds, 10 us to 10 s, each 1.41 times the one before; a last bin has no bound."""


class Latency:
    """Counts of durations by bin. One thread writes it."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0
        self.longest_s = 0.0

    def note(self, seconds: float) -> None:
        """It took so long once more."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    @property
    def count(self) -> int:
        """How often it was noted."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """A duration in seconds that `share` of all do not exceed, the upper bound of its bin; 0 if there is none."""
        return quantile(zip((*BOUNDS_S, self.longest_s), self.counts, strict=True), share, self.longest_s)


def quantile(bins: Iterable[tuple[float, int]], share: float, longest: float) -> float:
    """A duration that `share` of all do not exceed, at most the longest; 0 if there is none.

    bins: upper bounds with how many durations lie up to there and above the bound before.
    """
    bins = [(bound, count) for bound, count in bins if count]
    wanted, seen = share * sum(count for _, count in bins), 0
    for bound, count in bins:
        seen += count
        if seen >= wanted:
            return min(bound, longest)
    return 0.0
