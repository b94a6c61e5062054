"""Drafts keyed by the outcome of the step in flight."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True, eq=False)
class OutcomeTable:
    """Draft paths for likely outcomes of the step in flight: at most K outcomes for each of B sequences.

    An outcome is the number of accepted tokens of `SequencePlan.in_flight_draft` and the bonus token after them. A
    sequence without a step in flight has one outcome: no accepted tokens, and its last committed token as the bonus
    token.
    """

    accepted: np.ndarray
    """int32 [B, K]: the number of accepted draft tokens of each outcome; -1 for an unused entry."""
    bonus: np.ndarray
    """uint32 [B, K]: the bonus token."""
    tokens: np.ndarray
    """uint32 [B, K, n]: the draft after that outcome, a path."""
    lengths: np.ndarray
    """int32 [B, K]: number of tokens of each draft."""
    accept_prob: np.ndarray
    """float32 [B, K, n]."""
    source: np.ndarray
    """uint8 [B, K, n]: an `engine.drafters.sources.DraftSource` each."""

    @classmethod
    def empty(cls, sequences: int, outcomes: int, width: int) -> OutcomeTable:
        """Return a table of unused entries, with room for `outcomes` drafts of `width` tokens for each sequence."""
        return cls(
            accepted=np.full((sequences, outcomes), -1, np.int32),
            bonus=np.zeros((sequences, outcomes), np.uint32),
            tokens=np.zeros((sequences, outcomes, width), np.uint32),
            lengths=np.zeros((sequences, outcomes), np.int32),
            accept_prob=np.zeros((sequences, outcomes, width), np.float32),
            source=np.zeros((sequences, outcomes, width), np.uint8),
        )

    def scatter(self, indices: np.ndarray, count: int) -> OutcomeTable:
        """Return a table of `count` sequences: these rows at `indices`, int64 [B], and unused entries elsewhere."""
        table = OutcomeTable.empty(count, *self.tokens.shape[1:])
        for array in fields(table):
            getattr(table, array.name)[indices] = getattr(self, array.name)
        return table
