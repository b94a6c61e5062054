"""One state of the index, as queries read it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ssd.corpus.tier import SuffixArray
from ssd.kernels.match import TIER_COLUMNS

BASE, FROZEN, RECENT, LIVE = range(4)
"""Rows of a view's tiers, oldest text first."""
RING_HEAD, RING_SLOTS = 2, 3
"""Entries of a view's third array."""
LIBRARIES = 11
"""First entry of a view's frame that is for libraries."""
NO_TIERS = np.empty((0, TIER_COLUMNS), np.int64)


@dataclass(frozen=True, eq=False)
class View:
    """One state of the index. Nothing that it refers to is overwritten while it is held."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    """Arguments of kernels: tiers, int64 [4, 5], see `ssd.kernels.match`; the owner of each block of the live tier,
    int64; the ring's address, oldest position, head and number of slots, int64 [4]."""
    suffix_arrays: tuple[SuffixArray, ...]
    """The suffix arrays at the tiers' addresses. Holding that of the base tier also keeps the ring's text unchanged."""
    frame: np.ndarray
    """int64: addresses and lengths of the first two arrays, then the third, then addresses and length of the tags of
    the ring and the live tier, then address and length of `libraries`; the argument of `ssd.kernels.step`."""
    libraries: np.ndarray
    """int64 [n, 5]: the tiers of other corpora whose text is evidence, too."""

    def with_libraries(self, views: Sequence[View]) -> View:
        """Return this view together with the finished requests in views of other corpora."""
        libraries = np.concatenate([view.arrays[0][:LIVE] for view in views])
        frame = self.frame.copy()
        frame[LIBRARIES:] = libraries.ctypes.data, len(libraries)
        held = itertools.chain(self.suffix_arrays, *(view.suffix_arrays for view in views))
        return View(self.arrays, tuple(held), frame, libraries)
