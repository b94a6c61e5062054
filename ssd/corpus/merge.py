"""Merge sorted positions into a large suffix array in slices, leaving out old positions in the same pass."""

from __future__ import annotations

import numpy as np

from ssd.corpus.ring import Ring
from ssd.corpus.suffix_array import find_places, merge_some, merge_unsorted, usable_positions
from ssd.corpus.tier import SuffixArray, Tier

PLACES_AT_ONCE = 2048
COPIED_AT_ONCE = 1 << 20
"""Number of positions that one slice searches for, or copies, in a few milliseconds; new text waits for one slice."""


class Merge:
    """Merges `added` into a tier, which publishes the result when `step` returns True."""

    def __init__(self, tier: Tier, added: SuffixArray, ring: Ring, oldest: int, depth: int) -> None:
        """Prepare a merge; positions before `oldest` are left out."""
        self._tier, self._base, self._added = tier, tier.newest, added
        self._ring, self._depth = ring, depth
        self._window = oldest % ring.capacity, ring.head - oldest, ring.capacity
        self._places = np.empty(len(added), np.int64)
        self._found = 0
        self._progress = (0, 0, 0)
        """See `MergeProgress`."""
        self._into = tier.next_buffer()

    def step(self) -> bool:
        """Do a slice of the work; return whether it was the last one."""
        if self._found < len(self._added):
            until = min(len(self._added), self._found + PLACES_AT_ONCE)
            base, added = self._base, self._added
            find_places(
                self._ring.address,
                base.address,
                len(base),
                added.address,
                self._found,
                self._places,
                until,
                self._depth,
            )
            self._found = until
            return False
        self._progress = merge_some(
            self._base.address,
            len(self._base),
            self._added.address,
            len(self._added),
            self._places,
            self._into.address,
            self._window,
            self._progress,
            COPIED_AT_ONCE,
        )
        done, copied, size = self._progress
        if done < len(self._added) or copied < len(self._base):
            return False
        self._tier.publish(size)
        return True


def add_sorted(tier: Tier, ring: Ring, first: int, depth: int) -> None:
    """Merge the positions from `first` to the ring's head into a tier at once, which has no older ones to leave out."""
    added = np.empty(ring.head - first, np.uint32)
    size = usable_positions(ring.address, first % ring.capacity, len(added), ring.capacity, added.ctypes.data)
    base, into = tier.newest, tier.next_buffer()
    merge_unsorted(ring.address, base.address, len(base), added.ctypes.data, size, into.address, depth)
    tier.publish(len(base) + size)
