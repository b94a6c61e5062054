"""Drafts for a step whose text the host does not know yet: the step before is still under way.

They follow the last text that is known, and are long enough to reach beyond what the step under way may commit. Where
that turns out to be what they begin with, the device verifies what is left of them, see
`engine.executor.kernels.follow`. Where nothing is left, it verifies what it finds in the
sequence's own text, see `engine.executor.kernels.lookup`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from engine.config import EngineConfig
from engine.drafters.none import NoDrafter
from engine.executor.graph import Result
from engine.scheduling.sequence import NO_SOURCES, NO_TOKENS, Sequence
from engine.speculation.columns import Columns
from engine.speculation.drafting import Drafting
from engine.speculation.overlap import furthest
from engine.speculation.token_budget import Asking, Budget
from ssd.types import DraftBatch, Drafter, Progress, Source

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
    spare: int
    """Tokens to verify at most that are looked up in its place."""


class PreparedDrafting(Drafting):
    """Asks as `Drafting` does, and further."""

    def __init__(self, drafter: Drafter, config: EngineConfig, vocab_size: int, budget: Budget | None = None) -> None:
        """As `Drafting`."""
        super().__init__(drafter, config, vocab_size, budget)
        self._looks_up = not isinstance(drafter, NoDrafter)
        self._columns = Columns(config.max_draft)
        self._last: dict[int, PreparedPath] = {}
        """By sequence: the drafter's last draft."""
        self._likely: dict[int, int] = {}
        """By sequence: tokens that its last step commits if all that was prepared is accepted."""
        self._shared: dict[int, int] = {}
        """By sequence, of a draft that was verified: how many tokens the drafter's last one begins with too."""

    def prepare(self, sequences: SequenceOf[Sequence]) -> tuple[list[PreparedPath], Asking | None]:
        """Paths for sequences that all produce. While the drafter rests they are empty, and the rest is None; else it
        says whether there is a trial among them. How long asking took is for the caller to say: perhaps nobody waited.
        """
        asking = None
        if self._budget is not None and self._budget.rests:
            paths = [self._empty(sequence) for sequence in sequences]
        else:
            cost = None if self._budget is None else self._budget.price(len(sequences), len(sequences))
            paths = self._paths(sequences, self._drafts_for(sequences, cost))
            self._last.update((sequence.sequence_id, path) for sequence, path in zip(sequences, paths, strict=True))
            asking = Asking(0.0)
        if self._budget is not None:
            paths, is_trial = self._worth_verifying(sequences, paths, self._budget)
            asking = asking and asking._replace(is_trial=is_trial)
        self._likely.update((one.sequence_id, 1 + path.most) for one, path in zip(sequences, paths, strict=True))
        return paths, asking

    def note(self, paths: SequenceOf[PreparedPath], results: SequenceOf[Result]) -> None:
        """What became of a step's drafts, of sequences that produced."""
        self._columns.note(
            [path.most > 0 for path in paths],
            [path.spare for path in paths],
            [result.is_found for result in results],
            [len(result.tokens) - 1 if len(result.draft) else -1 for result in results],
        )

    def verified(self, sequence: Sequence, path: PreparedPath, result: Result) -> None:
        """The draft of a sequence was verified; note it there, before what came of it is committed.

        The drafter is told of it only as far as its last one, for the same text, was the same; and not at all if that
        was for an earlier text, or the draft was none of its own.
        """
        draft = sequence.draft = result.draft
        begun = len(sequence) - path.length
        if result.is_found:
            sequence.draft_sources = np.full(len(draft), Source.LOCAL, np.uint8)
        else:
            sequence.draft_sources = path.sources[begun : begun + len(draft)]
        if sequence.untold_steps:
            return
        last = self._last.get(sequence.sequence_id)
        offered = NO_TOKENS if last is None or result.is_found else last.tokens
        if len(offered) and offered is path.tokens:  # it was the last one itself
            return
        most = min(len(draft), len(offered))
        differs = draft[:most] != offered[:most]
        self._shared[sequence.sequence_id] = int(np.append(differs, True).argmax())

    def end(self, sequence: Sequence, learn: bool) -> None:
        """See `Drafting.end`."""
        self._restrict(sequence)
        self._last.pop(sequence.sequence_id, None)
        self._likely.pop(sequence.sequence_id, None)
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

    def _paths(self, sequences: SequenceOf[Sequence], drafts: DraftBatch) -> list[PreparedPath]:
        tokens, odds, sources = drafts.tokens, drafts.accept_prob, drafts.source
        starts = drafts.offsets.tolist()
        paths = []
        for index, (sequence, size) in enumerate(zip(sequences, self._usable_sizes(drafts), strict=True)):
            own = slice(starts[index], starts[index] + size)
            spare = self._spare(sequence)
            # Of what is under way, at least one token comes to be committed.
            left = size - 1 if sequence.in_flight and size else size
            most = min(self._most(sequence), left, sequence.draft_room)
            paths.append(PreparedPath(tokens[own], odds[own], sources[own], len(sequence), most, spare))
        return paths

    def _usable_sizes(self, drafts: DraftBatch) -> list[int]:
        """How many tokens of each draft, from the first on, follow one another and are known to the model: a remote
        drafter's word is no reason to index out of the embedding.
        """
        sizes = np.diff(drafts.offsets).astype(np.int64)
        within = np.arange(len(drafts.tokens)) - drafts.offsets[:-1].astype(np.int64).repeat(sizes)
        ends = np.flatnonzero((drafts.parents != within - 1) | (drafts.tokens >= self._vocab_size))
        # The first end of each draft is written last.
        sizes[np.arange(len(sizes)).repeat(sizes)[ends[::-1]]] = within[ends[::-1]]
        return sizes.tolist()

    def _empty(self, sequence: Sequence) -> PreparedPath:
        return PreparedPath(NO_TOKENS, NO_ODDS, NO_SOURCES, len(sequence), 0, self._spare(sequence))

    def _spare(self, sequence: Sequence) -> int:
        if not self._looks_up:
            return 0
        # Of what is under way at least one token comes; and the target adds one of its own.
        left = sequence.room - 1 - min(sequence.in_flight, 1)
        return max(0, min(self._most(sequence), sequence.draft_room, left))

    def _worth_verifying(
        self, sequences: SequenceOf[Sequence], paths: SequenceOf[PreparedPath], budget: Budget
    ) -> tuple[list[PreparedPath], bool]:
        """The paths, cut to what pays, and whether there is a trial among them. What pays goes by the likeliest
        outcome: all of the draft before is accepted.
        """
        odds = []
        for sequence, path in zip(sequences, paths, strict=True):
            committed = self._likely.get(sequence.sequence_id, 0) if sequence.in_flight else 0
            odds.append(path.odds[committed : committed + path.most])
        room = [path.spare for path in paths]
        lengths, is_trial = budget.spend(self._columns.drafts(odds, room), np.array(room), len(sequences))
        cut = [
            path._replace(most=min(path.most, length), spare=min(path.spare, length))
            for path, length in zip(paths, lengths.tolist(), strict=True)
        ]
        return cut, is_trial

    def _limits(self, sequences: SequenceOf[Sequence]) -> list[int]:
        return [min(furthest(self._most(sequence)), sequence.room - 1) for sequence in sequences]
