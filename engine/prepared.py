"""Drafts for a step whose text the host does not know yet: the step before is still under way.

They follow the last text that is known, and are long enough to reach beyond what the step under way may commit. Where
that turns out to be what they begin with, the device verifies what is left of them, see `engine.device.follow`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from engine.budget import Asking, Budget
from engine.config import EngineConfig
from engine.drafting import Drafting
from engine.overlap import furthest
from engine.sequence import NO_SOURCES, NO_TOKENS, Sequence
from engine.tree import straight_length
from ssd.draft import DraftBatch, Drafter, Path, Progress

NO_ODDS = np.empty(0, np.float32)


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
        self._last: dict[int, PreparedPath] = {}
        """By sequence: the drafter's last draft."""
        self._shared: dict[int, int] = {}
        """By sequence, of a draft that was verified: how many tokens the drafter's last one begins with too."""

    def prepare(self, sequences: SequenceOf[Sequence]) -> tuple[list[PreparedPath], Asking | None]:
        """Paths for sequences that all produce; how much is verified goes by the likeliest outcome, that all of the
        draft before is accepted. Empty ones and None while the drafter rests; else whether there is a trial among
        them. What asking took is for the caller to say: the device has not waited for it.
        """
        if self._budget is not None and self._budget.rests:
            return [PreparedPath(NO_TOKENS, NO_ODDS, NO_SOURCES, len(sequence), 0) for sequence in sequences], None
        cost = None if self._budget is None else self._budget.price(len(sequences), len(sequences))
        drafts = self._drafts_for(sequences, cost)
        paths = [self._path(sequence, drafts, index) for index, sequence in enumerate(sequences)]
        self._last.update((sequence.sequence_id, path) for sequence, path in zip(sequences, paths, strict=True))
        if self._budget is None:
            return paths, Asking(0.0)
        likely = [
            Path(path.tokens[sequence.in_flight :], path.odds[sequence.in_flight :])
            for path, sequence in zip(paths, sequences, strict=True)
        ]
        usable = np.array([min(path.most, len(left.tokens)) for path, left in zip(paths, likely, strict=True)])
        lengths, is_trial = self._budget.spend(DraftBatch.of_paths(likely), usable, len(sequences))
        cut = [path._replace(most=length) for path, length in zip(paths, lengths.tolist(), strict=True)]
        return cut, Asking(0.0, is_trial)

    def verified(self, sequence: Sequence) -> None:
        """The draft of a sequence was verified, what came of it is to be committed. The drafter is told of it only as
        far as its last one, for the same text, was the same; and not at all if that was for an earlier text.
        """
        last = self._last.get(sequence.sequence_id)
        if last is None or sequence.untold_steps:
            return
        draft = sequence.draft
        most = min(len(draft), len(last.tokens))
        self._shared[sequence.sequence_id] = int(np.append(draft[:most] != last.tokens[:most], True).argmax())

    def end(self, sequence: Sequence, learn: bool) -> None:
        """See `Drafting.end`."""
        self._restrict(sequence)
        self._last.pop(sequence.sequence_id, None)
        super().end(sequence, learn)

    def _progress(self, sequences: SequenceOf[Sequence], cost: float | None, limits: SequenceOf[int]) -> Progress:
        for sequence in sequences:
            self._restrict(sequence)
        return super()._progress(sequences, cost, limits)

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

    def _limits(self, sequences: SequenceOf[Sequence]) -> list[int]:
        return [min(furthest(self._most(sequence)), sequence.room - 1) for sequence in sequences]
