"""The engine's side of drafting: what it tells its drafter, and which drafts a step verifies."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from time import perf_counter

import numpy as np

from engine.config import EngineConfig
from engine.scheduling.sequence import NO_TOKENS, Sequence
from engine.speculation.draft_tree import DraftTree, straight_length
from engine.speculation.token_budget import Asking, Budget
from ssd.types import DraftBatch, Drafter, Progress, offsets_of


class Drafting:
    """Asks before every step, and waits for the answer: the plain loop."""

    def __init__(self, drafter: Drafter, config: EngineConfig, vocab_size: int, budget: Budget | None = None) -> None:
        """Without a `budget` everything is verified that was drafted."""
        self._drafter = drafter
        self._config = config
        self._vocab_size = vocab_size
        self._budget = budget

    @property
    def drafter(self) -> Drafter:
        """Whom drafts come from."""
        return self._drafter

    def introduce(self, sequence: Sequence) -> None:
        """Tell the drafter of a sequence, unless it was told before a preemption."""
        if sequence.told == 0:
            self._start(sequence)
            sequence.told = len(sequence.request.prompt)

    def draft(self, sequences: SequenceOf[Sequence]) -> Asking | None:
        """Give a draft to every sequence of a step that is to produce; None if the drafter was not asked."""
        for sequence in sequences:
            sequence.draft, sequence.tree = NO_TOKENS, None
        producing = [sequence for sequence in sequences if sequence.completes_prompt]
        if not producing or (self._budget is not None and self._budget.rests):
            return None
        tokens = sum(sequence.scheduled for sequence in sequences)
        cost = None if self._budget is None else self._budget.price(tokens, len(producing))
        began = perf_counter()
        drafts = self._drafts_for(producing, cost)
        # Drafts made beside a forward are longer than what a step verifies.
        lengths = np.minimum(np.diff(drafts.offsets), [self._limit(sequence) for sequence in producing])
        asking = Asking(perf_counter() - began)
        if self._budget is not None:
            lengths, is_trial = self._budget.spend(drafts, lengths, tokens)
            asking = asking._replace(is_trial=is_trial)
        # A remote drafter's word is no reason to index out of the embedding.
        foreign = drafts.tokens >= self._vocab_size
        has_foreign = np.count_nonzero(foreign) > 0
        for index, (sequence, length) in enumerate(zip(producing, lengths.tolist(), strict=True)):
            if has_foreign and length:
                first = int(drafts.offsets[index])
                length = int(np.append(foreign[first : first + length], True).argmax())
            if length:
                sequence.draft = drafts.tokens_of(index)[:length]
                sequence.draft_sources = drafts.sources_of(index)
                self._shape(sequence, drafts.parents_of(index)[:length])
        return asking

    def look_back(self, sequences: SequenceOf[Sequence]) -> None:
        """What these produced is known: drafts for what follows may be made beside what is done with it."""

    def end(self, sequence: Sequence, learn: bool) -> None:
        """A sequence is over; its drafter may learn what it produced."""
        if sequence.told > 0:
            self._finish(sequence, learn)

    def close(self) -> None:
        """Release the drafter."""
        self._drafter.close()

    def _start(self, sequence: Sequence) -> None:
        self._drafter.start(sequence.sequence_id, sequence.request.prompt)

    def _drafts_for(self, sequences: SequenceOf[Sequence], cost: float | None) -> DraftBatch:
        return self._drafter.draft(self._progress(sequences, cost, self._limits(sequences)))

    def _finish(self, sequence: Sequence, learn: bool) -> None:
        if sequence.untold_steps > 1:
            self._drafter.draft(self._progress([sequence], None, [0]))
        self._drafter.finish(
            sequence.sequence_id,
            sequence.untold,
            verified=sequence.last_verified,
            learn=learn,
        )

    def _progress(self, sequences: SequenceOf[Sequence], cost: float | None, limits: SequenceOf[int]) -> Progress:
        """What the drafter has not been told of these sequences, as if it now were, and how much it may draft."""
        untold = [sequence.untold for sequence in sequences]
        steps = np.array([sequence.untold_steps for sequence in sequences], np.uint32)
        progress = Progress(
            sequence_ids=np.array([sequence.sequence_id for sequence in sequences], np.uint64),
            tokens=np.concatenate(untold),
            offsets=offsets_of(np.array([len(tokens) for tokens in untold])),
            verified=np.array([sequence.last_verified for sequence in sequences], np.uint32),
            max_draft=np.array(limits, np.uint32),
            cost=cost,
            steps=steps if np.count_nonzero(steps > 1) else None,
        )
        for sequence in sequences:
            sequence.told, sequence.untold_steps = len(sequence), 0
            sequence.last_verified = sequence.last_accepted = 0
        return progress

    def _limits(self, sequences: SequenceOf[Sequence]) -> list[int]:
        """Most draft tokens that the drafter is asked for."""
        return [self._limit(sequence) for sequence in sequences]

    def _shape(self, sequence: Sequence, parents: np.ndarray) -> None:
        """Note whose child each draft token is; parents come first, so what is left of a cut tree is one."""
        straight = straight_length(parents)
        if straight == len(parents):
            return
        if self._config.draft_shape == "tree":
            sequence.tree = DraftTree(parents)
        else:
            sequence.draft = sequence.draft[:straight]

    def _limit(self, sequence: Sequence) -> int:
        """Most draft tokens of a sequence in this step."""
        # The target adds a token of its own behind the draft.
        return min(self._most(sequence), sequence.room - 1, sequence.draft_room)

    def _most(self, sequence: Sequence) -> int:
        """Most draft tokens of a sequence in any step."""
        asked = sequence.request.max_draft
        return self._config.max_draft if asked is None else min(asked, self._config.max_draft)
