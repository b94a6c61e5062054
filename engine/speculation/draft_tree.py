"""The shapes of draft trees: the parent of each draft token, and paths from the root."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from engine.scheduling.kernels import FIRST_TOKEN, PRODUCED
from ssd.kernels.jit import BoolRows, IntRows, LongRows, Longs, Nothing, Parents, TokenRows, Tokens, kernel
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
        return depths_of(self.parents, np.array([0, len(self.parents)], np.uint32))


@kernel(Parents, BoolRows, returns=Nothing)
def _fill_sees(parents, sees):
    for node in range(len(parents)):
        at = node
        while at >= 0:
            sees[node, at] = True
            at = parents[at]


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


def depths_of(parents: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return `DraftTree.depths` of each draft of a batch, int64 [T]; parents and offsets as in `DraftBatch`."""
    depths = np.empty(len(parents), np.int64)
    _fill_depths(parents, offsets, depths)
    return depths


@kernel(Parents, Tokens, Longs, returns=Nothing)
def _fill_depths(parents, offsets, depths):
    for index in range(len(offsets) - 1):
        first = np.int64(offsets[index])
        for node in range(first, np.int64(offsets[index + 1])):
            depths[node] = depths[first + parents[node]] + 1 if parents[node] >= 0 else 1


@kernel(Tokens, Parents, Tokens, TokenRows, Longs, Longs, Longs, Longs, LongRows, returns=Nothing)
def find_paths(tokens, parents, offsets, committed, lengths, indices, verified, accepted, paths):
    """Find the path of committed tokens in each of some drafts.

    tokens, parents, offsets: as in `DraftBatch`. committed: uint32 [P, W], of which the first `lengths`, int64 [P], are
    committed. indices: int64 [n], of the drafts to search. Writes to arrays of P elements or rows: the number of draft
    tokens before the first one that is deeper than the committed tokens, the length of the path, and its nodes.
    """
    for index in indices:
        first, count, depth = np.int64(offsets[index]), np.int64(offsets[index + 1] - offsets[index]), lengths[index]
        depths = np.empty(count, np.int64)
        usable = 0
        while usable < count:
            parent = parents[first + usable]
            depths[usable] = 1 if parent < 0 else depths[parent] + 1
            if depths[usable] > depth:
                break
            usable += 1
        at, found = ROOT, 0
        for node in range(usable):
            is_next = found < depth and parents[first + node] == at
            if is_next and tokens[first + node] == committed[index, found]:
                paths[index, found] = at = node
                found += 1
        verified[index], accepted[index] = usable, found


@kernel(Tokens, Parents, Tokens, Longs, Longs, Longs, Longs, IntRows, LongRows, returns=Nothing)
def accept_exactly(tokens, parents, offsets, lengths, indices, targets, bounds, values, paths):
    """Accept the draft tokens of some sequences that equal the target's: a path from the root, the first of equal ones.

    tokens, parents, offsets: as in `DraftBatch`. lengths: int64 [P], number of verified tokens of each draft. indices:
    int64 [n]. targets, bounds: the target's token after the context and after each draft token of each of the n
    sequences, and offsets into these. Writes number of tokens, tokens and path to rows of `values` and `paths`, which
    are those of `StepResult`.
    """
    for place in range(len(indices)):
        index, row, at, found = indices[place], bounds[place], ROOT, 0
        first = np.int64(offsets[index])
        # Parents precede their children, so one pass finds the path.
        for node in range(lengths[index]):
            if parents[first + node] == at and tokens[first + node] == targets[row + 1 + at]:
                values[index, FIRST_TOKEN + found] = tokens[first + node]
                paths[index, found] = at = node
                found += 1
        values[index, FIRST_TOKEN + found] = targets[row + 1 + at]
        values[index, PRODUCED] = found + 1
