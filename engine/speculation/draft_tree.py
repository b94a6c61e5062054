"""The shape of a draft tree: the parent of each draft token."""

from __future__ import annotations

from functools import cached_property

import numpy as np


class DraftTree:
    """Parents of k draft tokens, -1 for a child of the context; parents precede their children."""

    def __init__(self, parents: np.ndarray) -> None:
        """parents: int32 [k]."""
        self.parents = parents

    @cached_property
    def sees(self) -> np.ndarray:
        """bool [k, k]: which draft tokens each of them attends to, its ancestors and itself."""
        size = len(self.parents)
        sees = np.eye(size, dtype=bool)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                sees[node] |= sees[parent]
        return sees

    @cached_property
    def depths(self) -> np.ndarray:
        """int64 [k]: distance of each draft token from the context, at least 1."""
        return np.count_nonzero(self.sees, axis=1)


def straight_length(parents: np.ndarray) -> int:
    """Return the number of leading draft tokens that form a path: each is the child of the one before it."""
    branches = np.flatnonzero(parents != np.arange(-1, len(parents) - 1))
    return int(branches[0]) if len(branches) else len(parents)


def straight_lengths(parents: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return `straight_length` of each draft of a batch, int64 [B]; parents and offsets as in `DraftBatch`."""
    bounds = offsets.astype(np.int64)
    lengths = np.diff(bounds)
    branches = np.flatnonzero(parents != np.arange(len(parents)) - 1 - bounds[:-1].repeat(lengths))
    if not len(branches):
        return lengths
    first = np.append(branches, len(parents))[np.searchsorted(branches, bounds[:-1])]
    return np.minimum(first, bounds[1:]) - bounds[:-1]
