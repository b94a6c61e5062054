"""Convert a drafter's raw scores to acceptance probabilities, learned from results.

A drafter's probability of a token says which tokens are likely, but it is not the probability that the target accepts
the token: drafters are over-confident, more so at greater depths. The token budget compares tokens of different
sequences and drafters, so each drafter learns a table from (score, depth) to the observed rate of acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from engine.drafters.base import DETERMINISTIC
from engine.drafters.draft_pool import Candidates, PoolDrafts
from engine.scheduling.plan import SequenceResult
from engine.scheduling.sequence import Sequence
from ssd.kernels.jit import Bool, Bools, FloatRows, FloatsOut, Int, Longs, Nothing, kernel, outline

EDGES = np.array([0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
"""Upper bounds of the intervals of scores, finer at both ends."""
DEPTHS = 8
"""Depths that are counted separately; deeper tokens are counted with the last of them."""
PRIOR_WEIGHT = 4.0
"""Number of observations that the initial value of an entry, the score itself, counts for."""
MAX_WEIGHT = 250.0
"""Largest number of observations that an entry remembers, so that it follows changes of the traffic."""


class AcceptanceTable:
    """Estimates the probability that a draft token is accepted, given that its parent is.

    Requests that sample are counted separately, because their scores include noise.
    """

    def __init__(self) -> None:
        middles = (np.append(0.0, EDGES) + np.append(EDGES, 1.0)) / 2
        self.rates = np.tile(middles.astype(np.float32), (2 * DEPTHS, 1))
        """float32 [2 * DEPTHS, len(EDGES) + 1]: the probabilities by depth and interval of scores, for greedy requests,
        then for sampled ones."""
        self._weights = np.full(self.rates.shape, PRIOR_WEIGHT, np.float32)

    def accept_prob(self, is_sampled: np.ndarray, scores: np.ndarray, depths: int | np.ndarray) -> np.ndarray:
        """Return the probabilities of tokens, float32 [n].

        is_sampled: bool [n]. scores: float [n], 0 to 1, higher for likelier tokens. depths: int [n] or of all, from 1.
        All of them may have further dimensions.
        """
        rows = is_sampled * DEPTHS + (np.minimum(depths, DEPTHS) - 1)
        return self.rates[rows, EDGES.searchsorted(scores, side="right")]

    def observe(self, is_sampled: bool, scores: np.ndarray, depths: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from verified tokens of a request whose parents were accepted; accepted: bool [n]."""
        _observe(self.rates, self._weights, is_sampled, scores.astype(np.float32), depths, accepted)

    def observe_draft(self, is_sampled: bool, nodes: Candidates, first: int, count: int, kept: np.ndarray) -> int:
        """Learn from those of `count` verified nodes whose parents were accepted; return the depth that was reached.

        nodes: with parents within the draft. first: index of the draft's first node. kept: int64 [a], the accepted ones
        within the draft.
        """
        part = slice(first, first + count)
        columns = nodes.parent[part], nodes.depth[part], nodes.score[part]
        return int(_observe_draft(self.rates, self._weights, is_sampled, *columns, kept))


@outline
def _count(rates, weights, is_sampled, depth, score, accepted):
    row = is_sampled * DEPTHS + min(depth, DEPTHS) - 1
    interval = np.searchsorted(EDGES, score, side="right")
    weight = weights[row, interval]
    rates[row, interval] = (rates[row, interval] * weight + accepted) / (weight + 1)
    weights[row, interval] = min(weight + 1, MAX_WEIGHT)


@kernel(FloatRows, FloatRows, Bool, FloatsOut, Longs, Bools, returns=Nothing)
def _observe(rates, weights, is_sampled, scores, depths, accepted):
    for index in range(len(scores)):
        _count(rates, weights, is_sampled, depths[index], scores[index], accepted[index])


@kernel(FloatRows, FloatRows, Bool, Longs, Longs, FloatsOut, Longs, returns=Int)
def _observe_draft(rates, weights, is_sampled, parents, depths, scores, kept):
    reached = 0
    is_kept = np.zeros(len(parents), np.bool_)
    for node in kept:
        is_kept[node] = True
    for node in range(len(parents)):
        if parents[node] < 0 or is_kept[parents[node]]:
            _count(rates, weights, is_sampled, depths[node], scores[node], is_kept[node])
            reached = max(reached, depths[node])
    return reached


class Calibration:
    """The acceptance table of a drafter, and the drafts from whose results it learns."""

    def __init__(self) -> None:
        self.table = AcceptanceTable()
        self._drafts: dict[int, tuple[Candidates, int]] = {}
        """For each sequence, the drafts of the step in which it was last drafted, and its first node there."""

    def remember(self, sequences: SequenceOf[Sequence], drafts: PoolDrafts) -> None:
        """Keep the drafts of a step until their results are known."""
        for sequence, start in zip(sequences, drafts.batch.offsets.tolist(), strict=False):
            self._drafts[sequence.sequence_id] = drafts.nodes, start

    def learn(self, result: SequenceResult) -> int:
        """Learn from the result of the last draft of a sequence.

        Return the depth of the deepest token whose parent was accepted, 0 if nothing is learned.
        """
        draft = self._drafts.pop(result.sequence_id, None)
        # Drafts that are verified by rejection may be selected by depth instead of by rank.
        q_rows = result.plan.q_rows
        is_sampled_from_q = q_rows is not None and bool((q_rows != DETERMINISTIC).any())
        if draft is None or not result.drafted or is_sampled_from_q:
            return 0
        is_sampled = result.plan.sequence.request.sampling.is_sampled
        return self.table.observe_draft(is_sampled, *draft, result.drafted, result.kept)

    def forget(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        self._drafts.pop(sequence.sequence_id, None)
