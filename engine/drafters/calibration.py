"""Convert a drafter's raw scores to acceptance probabilities, learned from results.

A drafter's probability of a token says which tokens are likely, but it is not the probability that the target accepts
the token: drafters are over-confident, more so at greater depths. The token budget compares tokens of different
sequences and drafters, so each drafter learns a table from (score, depth) to the observed rate of acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from engine.drafters.draft_pool import Candidates, PoolDrafts
from engine.scheduling.plan import SequenceResult
from engine.scheduling.sequence import Sequence

EDGES = np.array([0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
"""Upper bounds of the intervals of scores, finer at both ends."""
DEPTHS = 8
"""Depths that are counted separately; deeper tokens are counted with the last of them."""
PRIOR_WEIGHT = 4.0
"""Number of observations that the initial value of an entry, the score itself, counts for."""
MAX_WEIGHT = 250.0
"""Largest number of observations that an entry remembers, so that it follows changes of the traffic."""


class AcceptanceTable:
    """Estimates the probability that a draft token is accepted, given that its parent is."""

    def __init__(self) -> None:
        middles = (np.append(0.0, EDGES) + np.append(EDGES, 1.0)) / 2
        self._rates = np.tile(middles, (DEPTHS, 1))
        self._weights = np.full(self._rates.shape, PRIOR_WEIGHT)

    @property
    def rates(self) -> np.ndarray:
        """float64 [DEPTHS, len(EDGES) + 1]: the probabilities by depth and interval of scores."""
        return self._rates

    def accept_prob(self, scores: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """Return the probabilities of tokens, float32 [n].

        scores: float [n], 0 to 1, higher for likelier tokens. depths: int [n], from 1.
        """
        return self._rates[_entries(scores, depths)].astype(np.float32)

    def observe(self, scores: np.ndarray, depths: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from verified tokens whose parents were accepted; accepted: bool [n]."""
        entries = _entries(scores, depths)
        counts, kept = np.zeros_like(self._rates), np.zeros_like(self._rates)
        np.add.at(counts, entries, 1.0)
        np.add.at(kept, entries, accepted)
        total = self._weights + counts
        self._rates = (self._rates * self._weights + kept) / total
        self._weights = np.minimum(total, MAX_WEIGHT)


def _entries(scores: np.ndarray, depths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.minimum(depths, DEPTHS) - 1, np.searchsorted(EDGES, scores, side="right")


class Calibration:
    """Acceptance tables of a drafter, and the drafts from whose results they learn."""

    def __init__(self) -> None:
        self._tables = {is_sampled: AcceptanceTable() for is_sampled in (False, True)}
        """By whether the request samples, because its scores then include noise."""
        self._drafts: dict[int, Candidates] = {}
        """The last draft of each sequence."""

    def accept_prob(self, is_sampled: np.ndarray, scores: np.ndarray, depth: int | np.ndarray) -> np.ndarray:
        """Return the probabilities of n tokens, float32 [n]; is_sampled: bool [n]. depth: of all, or int [n]."""
        depths = np.full(len(scores), depth)
        greedy, sampled = (self._tables[key].accept_prob(scores, depths) for key in (False, True))
        return np.where(is_sampled, sampled, greedy)

    def remember(self, sequences: SequenceOf[Sequence], drafts: PoolDrafts) -> None:
        """Keep the drafts of a step until their results are known."""
        bounds = drafts.batch.offsets.tolist()
        for sequence, start, end in zip(sequences, bounds[:-1], bounds[1:], strict=True):
            self._drafts[sequence.sequence_id] = drafts.nodes.take(np.arange(start, end))

    def learn(self, result: SequenceResult) -> tuple[np.ndarray, np.ndarray]:
        """Learn from the result of the last draft of a sequence.

        Return the depth of each token whose parent was accepted, int64 [n], and whether the token was, bool [n].
        """
        nodes = self._drafts.pop(result.sequence_id, None)
        # Drafts that are verified by rejection may be selected by depth instead of by rank.
        if nodes is None or not result.drafted or result.plan.q_rows is not None:
            return np.empty(0, np.int64), np.empty(0, np.bool_)
        verified = nodes.take(np.arange(result.drafted))
        reached = reached_tokens(verified.parent, result.kept)
        accepted = np.zeros(result.drafted, np.bool_)
        accepted[result.kept] = True
        table = self._tables[result.plan.sequence.request.sampling.is_sampled]
        table.observe(verified.score[reached], verified.depth[reached], accepted[reached])
        return verified.depth[reached], accepted[reached]

    def forget(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        self._drafts.pop(sequence.sequence_id, None)


def reached_tokens(parents: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return which draft tokens have an accepted parent, bool [k].

    parents: int [k], as in `DraftBatch`. kept: int64 [a], the accepted tokens.
    """
    is_kept = np.zeros(len(parents) + 1, np.bool_)
    is_kept[kept] = True
    is_kept[-1] = True  # The context, which `ROOT` refers to.
    return is_kept[parents]
