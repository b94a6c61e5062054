"""The shape of a draft tree: the parent of each draft token; the draft of one of several drafters."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from ssd.kernels.jit import BoolRows, Longs, Nothing, Parents, Tokens, kernel
from ssd.types import ROOT


class DraftTree:
    """Parents of k draft tokens, -1 for a child of the context; parents precede their children."""

    def __init__(self, parents: np.ndarray) -> None:
        """parents: int32 [k]."""
        self.parents = parents

    @cached_property
    def sees(self) -> np.ndarray:
        """bool [k, k]: which draft tokens each of them attends to, its ancestors and itself."""
        size = len(self.parents)
        sees = np.zeros((size, size), bool)
        _fill_sees(self.parents, sees)
        return sees

    @cached_property
    def depths(self) -> np.ndarray:
        """int64 [k]: distance of each draft token from the context, at least 1."""
        depths = np.empty(len(self.parents), np.int64)
        _fill_depths(self.parents, depths)
        return depths


@kernel(Parents, BoolRows, returns=Nothing)
def _fill_sees(parents, sees):
    for node in range(len(parents)):
        at = node
        while at >= 0:
            sees[node, at] = True
            at = parents[at]


@kernel(Parents, Longs, returns=Nothing)
def _fill_depths(parents, depths):
    for node in range(len(parents)):
        depths[node] = depths[parents[node]] + 1 if parents[node] >= 0 else 1


class OwnDraft(NamedTuple):
    """The draft of one drafter for one sequence, k tokens."""

    tokens: np.ndarray
    """uint32 [k]."""
    parents: np.ndarray
    """int32 [k]."""

    @property
    def tree(self) -> DraftTree | None:
        """The shape of the draft; None for a path."""
        is_path = straight_length(self.parents) == len(self.parents)
        return None if is_path else DraftTree(self.parents)

    def kept(self, committed: np.ndarray) -> np.ndarray:
        """Return the path of draft tokens that equal the committed ones, int64 [a]; committed: uint32 [m]."""
        path: list[int] = []
        at = ROOT
        for token in committed.tolist():
            nodes = np.flatnonzero((self.parents == at) & (self.tokens == token))
            if not len(nodes):
                break
            at = int(nodes[0])
            path.append(at)
        return np.array(path, np.int64)

    def until(self, depth: int) -> OwnDraft:
        """Return the tokens before the first one that is deeper than `depth`."""
        deeper = np.flatnonzero(DraftTree(self.parents).depths > depth)
        end = int(deeper[0]) if len(deeper) else len(self.tokens)
        return OwnDraft(self.tokens[:end], self.parents[:end])


def straight_length(parents: np.ndarray) -> int:
    """Return the number of leading draft tokens that form a path: each is the child of the one before it."""
    branches = np.flatnonzero(parents != np.arange(-1, len(parents) - 1))
    return int(branches[0]) if len(branches) else len(parents)


def straight_lengths(parents: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return `straight_length` of each draft of a batch, int64 [B]; parents and offsets as in `DraftBatch`."""
    lengths = np.empty(len(offsets) - 1, np.int64)
    _fill_straight_lengths(parents, offsets, lengths)
    return lengths


@kernel(Parents, Tokens, Longs, returns=Nothing)
def _fill_straight_lengths(parents, offsets, lengths):
    for index in range(len(lengths)):
        first, end = np.int64(offsets[index]), np.int64(offsets[index + 1])
        length = 0
        while first + length < end and parents[first + length] == length - 1:
            length += 1
        lengths[index] = length
