"""Candidates of the drafts of a batch, grown depth by depth, from which the likeliest are drafted.

EAGLE-2 (Li et al., 2024): at each depth the likeliest new candidates are expanded, and at the end the likeliest of all
candidates form the draft. The probability of a candidate is the product of `accept_prob` along its path, so a parent
is never less likely than its children.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.drafters.drafts import Drafts
from ssd.kernels.jit import FloatRows, FloatsOut, Int, LongRows, Longs, kernel
from ssd.types import ROOT, DraftBatch

if TYPE_CHECKING:
    from torch import Tensor

    from engine.sampling.draft_sampler import SampledTokens
    from ssd.acceptance import AcceptanceTable

START_CAPACITY = 64
"""Candidates that a pool has room for before its arrays grow."""


class Candidates(NamedTuple):
    """n candidates of the drafts of a batch."""

    owner: np.ndarray
    """int64 [n]: index of the sequence."""
    parent: np.ndarray
    """int64 [n]: index of the parent in the pool, `ROOT` for a child of the context."""
    token: np.ndarray
    """int64 [n]."""
    q_row: np.ndarray
    """int64 [n]: row of q that the token was sampled from, `DETERMINISTIC` for none."""
    accept_prob: np.ndarray
    """float32 [n]."""
    path_prob: np.ndarray
    """float32 [n]."""
    score: np.ndarray
    """float32 [n]: the drafter's own score."""


class DraftPool:
    """All candidates of a batch; those of a depth follow those of the depth before."""

    def __init__(self) -> None:
        # The columns of `Candidates`, and for each candidate the row of logits that it was chosen from.
        self._integers = np.empty((5, START_CAPACITY), np.int64)
        self._floats = np.empty((3, START_CAPACITY), np.float32)
        self._size = 0
        self._q: list[Tensor] = []
        """Distributions that tokens were sampled from, float32 [rows, V] for each depth."""

    def __len__(self) -> int:
        return self._size

    @property
    def nodes(self) -> Candidates:
        """All candidates, valid until the next change."""
        return Candidates(*self._integers[:4, : self._size], *self._floats[:, : self._size])

    @property
    def row(self) -> np.ndarray:
        """int64 [n]: index of each candidate's parent among the nodes after which `add` added it."""
        return self._integers[4, : self._size]

    def add(
        self,
        owner: np.ndarray,
        parent: np.ndarray,
        tokens: np.ndarray,
        scores: np.ndarray,
        accept_prob: np.ndarray,
        q_rows: np.ndarray,
    ) -> None:
        """Append at most c candidates of one depth after each of n nodes.

        owner: int64 [n], sequences of the nodes. parent: int64 [n], the nodes, or `ROOT`. tokens: int64 [n, c], those
        below 0 are skipped. scores, accept_prob: float32 [n, c]. q_rows: int64 [n].
        """
        self._reserve(self._size + tokens.size)
        self._size = _add(self._integers, self._floats, self._size, owner, parent, tokens, scores, accept_prob, q_rows)

    def add_sampled(
        self,
        owner: np.ndarray,
        parent: np.ndarray,
        sampled: SampledTokens,
        table: AcceptanceTable,
        is_sampled: np.ndarray,
        depth: int,
        *,
        rows: np.ndarray | slice = slice(None),
    ) -> int:
        """Append what was sampled after each of n nodes, and return the index of the first of these candidates.

        owner, parent: as for `add`. table: gives `accept_prob`. is_sampled: bool [n], whether the sequence of each node
        samples. depth: of the candidates. rows: int64 [n], the row of `sampled` of each node, by default its own.
        """
        first, scores = self._size, sampled.scores[rows]
        q_rows = sampled.q_rows(sum(map(len, self._q)))[rows]
        if sampled.q is not None:
            self._q.append(sampled.q)
        accept_prob = table.accept_prob(is_sampled[:, None], scores, depth)
        self.add(owner, parent, sampled.tokens[rows], scores, accept_prob, q_rows)
        return first

    def drafts(self, limits: np.ndarray, source: int) -> Drafts:
        """Return the likeliest candidates, see `drafts_of`."""
        return drafts_of(self.nodes, limits, source, torch.cat(self._q) if self._q else None)

    def likeliest(self, first: int, limits: np.ndarray) -> np.ndarray:
        """Return the likeliest of the candidates from `first` on, int64 [m], like `likeliest`."""
        part = slice(first, self._size)
        return first + likeliest(self._integers[0, part], self._floats[1, part], limits)

    def path_to(self, node: int) -> np.ndarray:
        """Return the tokens from the first one up to candidate `node`, uint32; none for `ROOT`."""
        nodes, tokens = self.nodes, list[int]()
        while node != ROOT:
            tokens.append(int(nodes.token[node]))
            node = int(nodes.parent[node])
        return np.array(tokens[::-1], np.uint32)

    def _reserve(self, capacity: int) -> None:
        if capacity <= self._integers.shape[1]:
            return
        added = 2 * capacity - self._integers.shape[1]
        self._integers = np.pad(self._integers, ((0, 0), (0, added)))
        self._floats = np.pad(self._floats, ((0, 0), (0, added)))


@kernel(LongRows, FloatRows, Int, Longs, Longs, LongRows, FloatRows, FloatRows, Longs, returns=Int)
def _add(integers, floats, size, owner, parent, tokens, scores, accept_prob, q_rows):
    for row in range(len(owner)):
        so_far = floats[1, parent[row]] if parent[row] >= 0 else np.float32(1)
        for rank in range(tokens.shape[1]):
            if tokens[row, rank] < 0:
                continue
            integers[0, size], integers[1, size], integers[2, size] = owner[row], parent[row], tokens[row, rank]
            integers[3, size], integers[4, size] = q_rows[row], row
            floats[0, size] = accept_prob[row, rank]
            floats[1, size] = so_far * accept_prob[row, rank]
            floats[2, size] = scores[row, rank]
            size += 1
    return size


def likeliest(owner: np.ndarray, path_prob: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return the rows of the likeliest candidates of each sequence, by sequence and descending probability, int64 [m].

    owner: int64 [n]. path_prob: float32 [n]. limits: int64 [B], largest number of candidates of each sequence. Equally
    likely candidates keep their order.
    """
    chosen = np.empty(len(owner), np.int64)
    return chosen[: _likeliest(owner, path_prob, limits, chosen)]


@kernel(Longs, FloatsOut, Longs, Longs, returns=Int)
def _likeliest(owner, path_prob, limits, chosen):
    counts = np.zeros(len(limits) + 1, np.int64)
    for own in owner:
        if counts[own] < limits[own]:
            counts[own] += 1
    ends = np.cumsum(counts)
    sizes = np.zeros(len(limits), np.int64)
    for node in range(len(owner)):
        own = owner[node]
        start = ends[own] - counts[own]
        place = start + sizes[own]
        if sizes[own] < counts[own]:
            sizes[own] += 1
        elif counts[own] <= 0 or not path_prob[node] > path_prob[chosen[place - 1]]:
            continue
        else:
            place -= 1
        while place > start and path_prob[node] > path_prob[chosen[place - 1]]:
            chosen[place] = chosen[place - 1]
            place -= 1
        chosen[place] = node
    return ends[-1]


def drafts_of(nodes: Candidates, limits: np.ndarray, source: int, q: Tensor | None = None) -> Drafts:
    """Return the likeliest of all candidates as drafts, parents before their children.

    limits: int64 [B], largest number of tokens of each draft. source: of all tokens. q: see `Drafts`.
    """
    rows = likeliest(nodes.owner, nodes.path_prob, limits)
    counts = np.bincount(nodes.owner[rows], minlength=len(limits))
    sources = np.full(len(nodes.owner), source, np.uint8)
    batch = DraftBatch.of_nodes(nodes.token, nodes.parent, nodes.accept_prob, sources, rows, counts)
    return Drafts(batch, q, None if q is None else nodes.q_row[rows].astype(np.int32), scores=nodes.score[rows])
