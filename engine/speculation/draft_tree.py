"""The shape of a draft tree: whose child each draft token is."""

from __future__ import annotations

from functools import cached_property

import numpy as np


class DraftTree:
    """Parents of k draft tokens, -1 for a child of the context; parents stand before their children."""

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
        """int64 [k]: how far behind the context each stands, from 1."""
        return np.count_nonzero(self.sees, axis=1)


def straight_length(parents: np.ndarray) -> int:
    """How many draft tokens, from the first on, each follow the one before; all of them if they are a path."""
    turns = np.flatnonzero(parents != np.arange(-1, len(parents) - 1))
    return int(turns[0]) if len(turns) else len(parents)
