"""One state of the index, as queries read it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ssd.corpus.tier import Order

BASE, FROZEN, RECENT, LIVE = range(4)
"""Rows of a view's tiers, oldest text first."""
RING_HEAD, RING_SLOTS = 2, 3
"""Of a view's third array."""


@dataclass(frozen=True, eq=False)
class View:
    """One state of the index. Whoever holds it keeps what it refers to from being overwritten."""

    arrays: tuple[np.ndarray, np.ndarray, np.ndarray]
    """As kernels take them: tiers, int64 [4, 3], see
    `ssd.kernels.match`; whose the blocks of the live tier are, int64; of
    the ring the address, first and last + 1 position remembered, and slots, int64 [4]."""
    orders: tuple[Order, ...]
    """What the addresses point to. As long as the one of the base is held, the ring's text stays, too."""
    frame: np.ndarray
    """int64: addresses and lengths of the first two arrays, then the third: what a step is handed."""
