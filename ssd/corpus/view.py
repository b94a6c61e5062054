"""One state of the index, as queries read it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ssd.corpus.tier import SuffixArray

BASE, FROZEN, RECENT, LIVE = range(4)
"""Rows of a view's tiers, oldest text first."""
RING_HEAD, RING_SLOTS = 2, 3
"""Entries of a view's third array."""
FRAME = 11
"""Number of entries of a view's frame."""


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
    the ring and the live tier; the argument of `ssd.kernels.step`, where those of libraries follow."""
