"""One state of the index, as queries read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np

from ssd.corpus.tier import SuffixArray
from ssd.kernels.arrays import opener
from ssd.kernels.match import TIER_COLUMNS

BASE, FROZEN, RECENT = range(3)
"""Rows of a view's tiers, oldest text first."""
RING_TEXT, RING_OLDEST, RING_HEAD, RING_SLOTS = range(4)
"""Entries of `ViewArrays.ring`: address of slot 0, oldest and next position, number of slots."""


class ViewArrays(NamedTuple):
    """The arrays of a view, as arguments of kernels."""

    tiers: Annotated[np.ndarray, np.int64, RECENT + 1, TIER_COLUMNS]
    """See `ssd.kernels.match`."""
    ring: Annotated[np.ndarray, np.int64, RING_SLOTS + 1]
    tags: Annotated[np.ndarray, np.uint16, "tags"]
    """Tag of each `TAGGED` slots of the ring, see `ssd.corpus.rollout`."""


open_view = opener(ViewArrays, "tags")
"""Returns the `ViewArrays` of `View.addresses` to a kernel."""


@dataclass(frozen=True, eq=False)
class View:
    """One state of the index. Nothing that it refers to is overwritten while it is held."""

    arrays: ViewArrays
    suffix_arrays: tuple[SuffixArray, ...]
    """The suffix arrays at the tiers' addresses. Holding that of the base tier also keeps the ring's text unchanged."""
    addresses: np.ndarray
    """int64: those of the arrays, as `open_view` expects them."""
