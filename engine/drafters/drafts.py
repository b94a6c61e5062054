"""Drafts of the sequences of a step, and rows that run after them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from ssd.types import DraftBatch, offsets_of

if TYPE_CHECKING:  # Drafters of tokens do not need PyTorch.
    from collections.abc import Sequence as SequenceOf

    from torch import Tensor

DETERMINISTIC = -1
"""Row of `Drafts.q` of a token that was not sampled."""


@dataclass(frozen=True, eq=False)
class ExtraRows:
    """Tokens that run after the drafts of B sequences without being verified, E tokens in total."""

    tokens: np.ndarray
    """uint32 [E]."""
    parents: np.ndarray
    """int32 [E]: index of the parent within the sequence's own extra rows, `ssd.types.ROOT` for a child of the
    context; parents precede their children."""
    offsets: np.ndarray
    """uint32 [B + 1]: sequence i has the extra rows `offsets[i]` up to `offsets[i + 1]`."""

    def scatter(self, indices: np.ndarray, count: int) -> ExtraRows:
        """See `Drafts.scatter`."""
        lengths = np.zeros(count, np.uint32)
        lengths[indices] = np.diff(self.offsets)
        return replace(self, offsets=offsets_of(lengths))


@dataclass(frozen=True, eq=False)
class Drafts:
    """Drafts for B sequences, T tokens in total."""

    batch: DraftBatch
    """Tokens, parents, `accept_prob` and sources, one draft per sequence of `StepPlan.producing`, in that order."""
    q: Tensor | None = None
    """float32 [R, V]: the distributions that tokens were sampled from; None if all candidates are deterministic."""
    q_rows: np.ndarray | None = None
    """int32 [T]: the row of `q` of each token, `DETERMINISTIC` for a token that was not sampled."""
    extra: ExtraRows | None = None
    """Rows that are not verified, for the same sequences; None if there are none."""
    scores: np.ndarray | None = None
    """float32 [T]: the drafter's own score of each token, which it may need in `observe`; None if it does not."""

    @staticmethod
    @cache
    def empty(sequences: int) -> Drafts:
        """Return no draft for any of `sequences`. Equal calls return the same object."""
        return Drafts(DraftBatch.empty(sequences))

    @cached_property
    def sizes(self) -> np.ndarray:
        """int64 [B]: number of tokens of each draft."""
        offsets = self.batch.offsets.astype(np.int64)
        return offsets[1:] - offsets[:-1]

    @property
    def owner(self) -> np.ndarray:
        """int64 [T]: index of the sequence of each token."""
        return np.arange(len(self.sizes)).repeat(self.sizes)

    def take(self, indices: SequenceOf[int] | np.ndarray) -> Drafts:
        """Return the drafts of some sequences, without extra rows."""
        return replace(self._at(self.batch.places(indices)), batch=self.batch.take(indices), extra=None)

    def scatter(self, indices: np.ndarray, count: int) -> Drafts:
        """Return drafts for `count` sequences: these at ascending `indices`, int64 [B], and none for the others."""
        extra = None if self.extra is None else self.extra.scatter(indices, count)
        return replace(self, batch=self.batch.scatter(indices, count), extra=extra)

    def replaced(self, indices: np.ndarray, others: Drafts) -> Drafts:
        """Return the drafts with those of some sequences, int64 [n], replaced by deterministic ones."""
        order = np.arange(len(self.batch))
        order[indices] = len(self.batch) + np.arange(len(indices))
        joined = DraftBatch.concatenate([self.batch, others.batch])
        places, count = joined.places(order), len(others.batch.tokens)
        q_rows, scores = self.q_rows, self.scores
        if q_rows is not None:
            q_rows = np.append(q_rows, np.full(count, DETERMINISTIC, np.int32))[places]
        if scores is not None:
            scores = np.append(scores, np.zeros(count, np.float32) if others.scores is None else others.scores)[places]
        return replace(self, batch=joined.take(order), q_rows=q_rows, scores=scores)

    def _at(self, places: np.ndarray) -> Drafts:
        """Return the rows of `q` and the scores of some tokens."""
        q_rows = None if self.q_rows is None else self.q_rows[places]
        return replace(self, q_rows=q_rows, scores=None if self.scores is None else self.scores[places])
