"""Drafts for a step whose text the host does not know yet: the step before is still under way.

They follow the last text that is known, and are long enough to reach beyond what the step under way may commit. Where
that turns out to be what they begin with, the device verifies what is left of them, see `engine.device.follow`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from engine.budget import Budget
from engine.config import EngineConfig
from engine.drafting import Drafting
from engine.overlap import furthest
from engine.sequence import Sequence
from engine.tree import straight_length
from ssd.draft import DraftBatch, Drafter, Path, Progress


class PreparedPath(NamedTuple):
    """For one sequence."""

    tokens: np.ndarray
    """uint32 [n]."""
    odds: np.ndarray
    """float32 [n]."""
    sources: np.ndarray
    """uint8 [n]."""
    length: int
    """Of the text that it follows."""
    most: int
    """Tokens to verify at most."""


class PreparedDrafting(Drafting):
    """Asks as `Drafting` does, and further."""

    def __init__(self, drafter: Drafter, config: EngineConfig, vocab_size: int, budget: Budget | None = None) -> None:
        """As `Drafting`."""
        super().__init__(drafter, config, vocab_size, budget)
        self._shared: dict[int, int] = {}
        """By sequence, of a draft that was verified: how many tokens the drafter's last one begins with too."""

    def prepare(self, sequences: SequenceOf[Sequence]) -> list[PreparedPath]:
        """Paths for sequences that all produce; how much is verified goes by the likeliest outcome, that all of the
        draft before is accepted.
        """
        cost = None if self._budget is None else self._budget.price(len(sequences), len(sequences))
        drafts = self._drafts_for(sequences, cost)
        paths = [self._path(sequence, drafts, index) for index, sequence in enumerate(sequences)]
        if self._budget is None:
            return paths
        likely = [
            Path(path.tokens[sequence.in_flight :], path.odds[sequence.in_flight :])
            for path, sequence in zip(paths, sequences, strict=True)
        ]
        lengths = self._budget.spend(DraftBatch.of_paths(likely), len(sequences)).tolist()
        return [path._replace(most=min(path.most, length)) for path, length in zip(paths, lengths, strict=True)]

    def verified(self, sequence: Sequence, later: PreparedPath | None) -> None:
        """The draft of a sequence was verified. The drafter is told of it only as far as its last one was the same:
        `later`, prepared for the same text.
        """
        shared, draft = 0, sequence.draft
        if later is not None:
            most = min(len(draft), len(later.tokens))
            shared = int(np.append(draft[:most] != later.tokens[:most], True).argmax())
        self._shared[sequence.sequence_id] = shared

    def end(self, sequence: Sequence, learn: bool) -> None:
        """See `Drafting.end`."""
        self._restrict(sequence)
        super().end(sequence, learn)

    def _progress(self, sequences: SequenceOf[Sequence], cost: float | None) -> Progress:
        for sequence in sequences:
            self._restrict(sequence)
        return super()._progress(sequences, cost)

    def _restrict(self, sequence: Sequence) -> None:
        shared = self._shared.pop(sequence.sequence_id, None)
        if shared is not None:
            sequence.last_verified = min(sequence.last_verified, shared)
            sequence.last_accepted = min(sequence.last_accepted, shared)

    def _path(self, sequence: Sequence, drafts: DraftBatch, index: int) -> PreparedPath:
        tokens = drafts.tokens_of(index)
        size = straight_length(drafts.parents_of(index))
        # A remote drafter's word is no reason to index out of the embedding.
        size = int(np.append(tokens[:size] >= self._vocab_size, True).argmax())
        first = int(drafts.offsets[index])
        odds = drafts.odds[first : first + size]
        # Of what is under way, at least one token comes to be committed.
        left = size - min(size, sequence.in_flight, 1)
        most = min(self._most(sequence), left, sequence.draft_room)
        return PreparedPath(tokens[:size], odds, drafts.sources_of(index)[:size], len(sequence), most)

    def _limit_of_asking(self, sequence: Sequence) -> int:
        return min(furthest(self._most(sequence)), sequence.room - 1)
