"""Convert a drafter's raw scores to acceptance probabilities, learned from what the target accepted.

A drafter's probability of a token says which tokens are likely, but it is not the probability that the target accepts
the token: drafters are over-confident, more so at greater depths. The token budget compares tokens of different
sequences and drafters, so each drafter learns a table from (score, depth) to the observed rate of acceptance.
"""

from __future__ import annotations

import numpy as np

from ssd.kernels.jit import Bool, Bools, FloatRows, Floats, FloatsOut, Longs, Nothing, Parents, Tokens, kernel, outline

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

    def learn(
        self,
        is_sampled: np.ndarray,
        parents: np.ndarray,
        offsets: np.ndarray,
        scores: np.ndarray,
        depths: np.ndarray,
        is_verified: np.ndarray,
        is_accepted: np.ndarray,
    ) -> np.ndarray:
        """Learn from the verified tokens of B drafts whose parents were accepted.

        is_sampled: bool [B]. parents, offsets: as in `DraftBatch`. scores: float32 [T]. depths: int64 [T], from 1.
        is_verified, is_accepted: bool [T]. Returns the depth of the deepest of these tokens in each draft, int64 [B], 0
        where nothing is learned.
        """
        reached = np.zeros(len(is_sampled), np.int64)
        _learn(
            self.rates, self._weights, is_sampled, parents, offsets, scores, depths, is_verified, is_accepted, reached
        )
        return reached


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


@kernel(
    FloatRows, FloatRows, Bools, Parents, Tokens, Floats, Longs, Bools, Bools, Longs, returns=Nothing
)  # fmt: skip
def _learn(rates, weights, is_sampled, parents, offsets, scores, depths, is_verified, is_accepted, reached):
    for index in range(len(reached)):
        first = np.int64(offsets[index])
        for token in range(first, np.int64(offsets[index + 1])):
            parent = parents[token]
            if is_verified[token] and (parent < 0 or is_accepted[first + parent]):
                _count(rates, weights, is_sampled[index], depths[token], scores[token], is_accepted[token])
                reached[index] = max(reached[index], depths[token])
