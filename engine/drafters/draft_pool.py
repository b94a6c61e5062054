"""Candidates of the drafts of a batch, grown depth by depth, from which the likeliest are drafted.

EAGLE-2 (Li et al., 2024): at each depth the likeliest new candidates are expanded, and at the end the likeliest of all
candidates form the draft. The probability of a candidate is the product of `accept_prob` along its path, so a parent
is never less likely than its children.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ssd.types import ROOT, DraftBatch, offsets_of


class Candidates(NamedTuple):
    """Candidates of one depth, or of all; n of them."""

    owner: np.ndarray
    """int64 [n]: index of the sequence."""
    parent: np.ndarray
    """int64 [n]: index of the parent in the pool, `ROOT` for a child of the context."""
    token: np.ndarray
    """int64 [n]."""
    depth: np.ndarray
    """int64 [n]: from 1."""
    accept_prob: np.ndarray
    """float32 [n]."""
    path_prob: np.ndarray
    """float32 [n]."""
    score: np.ndarray
    """float32 [n]: the drafter's own score."""
    q_row: np.ndarray
    """int64 [n]: row of q that the token was sampled from, `DETERMINISTIC` for none."""

    def take(self, rows: np.ndarray) -> Candidates:
        """Return some of the candidates."""
        return Candidates(*(column[rows] for column in self))


class DraftPool:
    """All candidates of a batch; those of a depth follow those of the depth before."""

    def __init__(self) -> None:
        self._parts: list[Candidates] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, candidates: Candidates) -> None:
        """Append the candidates of one depth."""
        self._parts.append(candidates)
        self._size += len(candidates.owner)

    def all(self) -> Candidates:
        """Return all candidates."""
        return Candidates(*(np.concatenate(columns) for columns in zip(*self._parts, strict=True)))

    def parent(self, node: int) -> int:
        """Return the index of a candidate's parent, or `ROOT`."""
        part, at = self._find(node)
        return int(part.parent[at])

    def path_to(self, node: int) -> np.ndarray:
        """Return the tokens from the first one up to candidate `node`, uint32; none for `ROOT`."""
        tokens: list[int] = []
        while node != ROOT:
            part, at = self._find(node)
            tokens.append(int(part.token[at]))
            node = int(part.parent[at])
        return np.array(tokens[::-1], np.uint32)

    def _find(self, node: int) -> tuple[Candidates, int]:
        for part in self._parts:
            if node < len(part.owner):
                return part, node
            node -= len(part.owner)
        raise IndexError(node)


class PoolDrafts(NamedTuple):
    """Drafts of a batch, and what their drafter remembers of them."""

    batch: DraftBatch
    nodes: Candidates
    """The drafted candidates in the order of `batch`, with parents within their drafts."""


def likeliest(owner: np.ndarray, path_prob: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return the rows of the likeliest candidates of each sequence, by sequence and descending probability, int64 [m].

    limits: int64 [B], largest number of candidates of each sequence. Equally likely candidates keep their order.
    """
    order = np.lexsort((-path_prob, owner))
    owners = owner[order]
    first = np.searchsorted(owners, owners, side="left")
    return order[np.arange(len(order)) - first < limits[owners]]


def drafts_of(pool: DraftPool, limits: np.ndarray, source: int) -> PoolDrafts:
    """Return the likeliest candidates as drafts, parents before their children.

    limits: int64 [B], largest number of tokens of each draft. source: of all tokens.
    """
    nodes = pool.all()
    rows = likeliest(nodes.owner, nodes.path_prob, limits)
    chosen = nodes.take(rows)
    counts = np.bincount(chosen.owner, minlength=len(limits))
    starts = np.cumsum(counts) - counts
    place = np.full(len(nodes.owner) + 1, ROOT)
    place[rows] = np.arange(len(rows)) - starts[chosen.owner]
    parents = place[chosen.parent]  # `ROOT` refers to the last element.
    chosen = chosen._replace(parent=parents)
    batch = DraftBatch(
        chosen.token.astype(np.uint32),
        parents.astype(np.int32),
        chosen.accept_prob.astype(np.float32),
        np.full(len(rows), source, np.uint8),
        offsets_of(counts),
    )
    return PoolDrafts(batch, chosen)
