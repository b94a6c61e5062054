"""One state of the index, as queries read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ssd.corpus.tier import SuffixArray
from ssd.kernels.match import SPAN_COLUMNS, TIER_COLUMNS

BASE, FROZEN, RECENT, LIVE = range(4)
"""Rows of a view's tiers, oldest text first."""
RING_HEAD, RING_SLOTS = 2, 3
"""Entries of a view's third array."""
FRAME = 11
"""Number of entries of a view's frame."""
LIBRARY_TIERS = LIVE
"""Number of tiers of a library: all but that of running requests."""
LIBRARY_ROOM = LIBRARY_TIERS * (TIER_COLUMNS + SPAN_COLUMNS)
_ROOM = np.zeros(LIBRARY_ROOM, np.int64)


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
    the ring and the live tier; the argument of `ssd.kernels.step`."""


def frame_of(view: View, libraries: Sequence[View]) -> np.ndarray:
    """Return the frame of a view with libraries: all frames, then room for the libraries' tiers and spans."""
    return np.concatenate([view.frame, *[library.frame for library in libraries], *[_ROOM] * len(libraries)])
