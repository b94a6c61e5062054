"""Drafting beside the forward, so that the engine waits less for its drafter.

As soon as a step's tokens are known, the drafter is asked for what follows, further than one step can verify. The
engine goes on, and waits before the next forward only if a sequence lacks a draft. The others draw on what is left of
an earlier one, and their answer comes while the forward runs: if it begins with what they produce meanwhile, it is a
draft for the step after, less those tokens. In the end the engine waits only where a draft was wrong or too short:

    step 1    waits for    t0 t1 t2 t3 t4 t5 t6 ...    verifies t0 t1 t2, commits t0 t1 t2 t3
    step 2    has                      t4 t5 t6 ...    verifies t4 t5 t6; meanwhile the drafter learns of t0 to t3 and
                                                       drafts t4 t5 t6 t7 t8 ..., of which step 3 has what follows

Outputs do not depend on drafts, so they are the same as in the plain loop.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from engine.config import EngineConfig
from engine.scheduling.sequence import NO_TOKENS, Sequence
from engine.speculation.drafting import Drafting
from engine.speculation.token_budget import Budget
from ssd.follow import NONE, count_shared, follow
from ssd.types import DraftBatch, Drafter, Progress, offsets_of

NO_DRAFTS = DraftBatch.empty(0)


class Answer(Protocol):
    """Drafts on their way."""

    def result(self) -> DraftBatch:
        """Wait for them."""
        ...


@runtime_checkable
class Asker(Protocol):
    """A drafter, or what stands before one, that need not be waited for."""

    def ask(self, progress: Progress) -> Answer:
        """As `Drafter.draft`, but for the waiting; the result is taken before anything else is called."""
        ...


class ThreadAsker:
    """Lets a drafter draft in a thread."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drafting")

    def ask(self, progress: Progress) -> Answer:
        """See `Asker.ask`."""
        return self._thread.submit(self._drafter.draft, progress)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


class Offer(NamedTuple):
    """A draft that a sequence may draw on."""

    place: int
    """Within the drafts of the last step, and behind those the drafts that were asked for beside it."""
    length: int
    """How many tokens the sequence had when it was made."""
    shared: int | None = None
    """If it came beside a step that verified another one, for the same text: the tokens that they begin with both."""


class Asked(NamedTuple):
    """Drafts that are made beside something else."""

    sequences: list[Sequence]
    answer: Answer


class OverlappedDrafting(Drafting):
    """Asks while the step before runs."""

    def __init__(self, drafter: Drafter, config: EngineConfig, vocab_size: int, budget: Budget | None = None) -> None:
        """As `Drafting`."""
        super().__init__(drafter, config, vocab_size, budget)
        self._asker: Asker = drafter if isinstance(drafter, Asker) else ThreadAsker(drafter)
        self._cost: float | None = None
        self._drafts = NO_DRAFTS
        """Of the last step, uncut, and what was made beside it."""
        self._asked: Asked | None = None
        self._offers: dict[int, Offer] = {}
        """By sequence; one that was not in the last step has none."""

    def look_back(self, sequences: SequenceOf[Sequence]) -> None:
        """Ask for what follows, before anything else is done with what was produced."""
        self._collect()
        running = [sequence for sequence in sequences if sequence.sequence_id in self._offers]
        for sequence in running:
            self._restrict(sequence)
        self._use(running, self._left_for(running))
        behind = [sequence for sequence in running if sequence.told < len(sequence)]
        if behind and (self._budget is None or not self._budget.rests):
            self._asked = Asked(behind, self._asker.ask(self._progress(behind, self._cost, self._limits(behind))))

    def introduce(self, sequence: Sequence) -> None:
        """See `Drafting.introduce`."""
        self._collect()
        super().introduce(sequence)

    def end(self, sequence: Sequence, learn: bool) -> None:
        """See `Drafting.end`."""
        self._collect()
        self._restrict(sequence)
        self._offers.pop(sequence.sequence_id, None)
        super().end(sequence, learn)

    def close(self) -> None:
        """Release the drafter."""
        try:
            self._collect()
        finally:  # What was asked for may have failed.
            if isinstance(self._asker, ThreadAsker):
                self._asker.close()
            super().close()

    def _drafts_for(self, sequences: SequenceOf[Sequence], cost: float | None) -> DraftBatch:
        self._cost = cost
        new = [sequence for sequence in sequences if sequence.sequence_id not in self._offers]
        left = self._left_for(sequences)
        if new or self._is_lacking(sequences, left):
            self._collect()
            if new:
                self._take(new, self._drafter.draft(self._progress(new, cost, self._limits(new))), [None] * len(new))
            left = self._left_for(sequences)
        self._use(sequences, left)
        return left

    def _use(self, sequences: SequenceOf[Sequence], drafts: DraftBatch) -> None:
        """From now on these draw on these drafts, which follow their whole text."""
        self._drafts = drafts
        self._offers = {one.sequence_id: Offer(place, len(one)) for place, one in enumerate(sequences)}

    def _is_lacking(self, sequences: SequenceOf[Sequence], drafts: DraftBatch) -> bool:
        """Whether one of them could use more than it has, and more was asked for."""
        if self._asked is None:
            return False
        sizes = (drafts.offsets[1:] - drafts.offsets[:-1]).tolist()
        wanted = [min(self._most(sequence), sequence.room - 1) for sequence in sequences]
        return any(size < most for size, most in zip(sizes, wanted, strict=True))

    def _collect(self) -> None:
        """Take what was asked for: those that it is for draw on it from now on."""
        if self._asked is None:
            return
        sequences, answer = self._asked
        self._asked = None
        prepared = answer.result()
        offers = [self._offers.get(sequence.sequence_id) for sequence in sequences]
        rows = np.array([NONE if offer is None else offer.place for offer in offers])
        self._take(sequences, prepared, count_shared(prepared, np.arange(len(sequences)), self._drafts, rows).tolist())

    def _take(self, sequences: SequenceOf[Sequence], drafts: DraftBatch, shared: SequenceOf[int | None]) -> None:
        """From now on these draw on these drafts, which follow all that the drafter was told of."""
        for place, (sequence, count) in enumerate(zip(sequences, shared, strict=True), len(self._drafts)):
            self._offers[sequence.sequence_id] = Offer(place, sequence.told, count)
        self._drafts = DraftBatch.concatenate([self._drafts, drafts])

    def _restrict(self, sequence: Sequence) -> None:
        """What became of a draft is told as far as it was the drafter's last one."""
        offer = self._offers.get(sequence.sequence_id)
        if offer is not None and offer.shared is not None:
            sequence.last_verified = min(sequence.last_verified, offer.shared)
            sequence.last_accepted = min(sequence.last_accepted, offer.shared)

    def _left_for(self, sequences: SequenceOf[Sequence]) -> DraftBatch:
        """What is left for each sequence of the draft that it may draw on."""
        picks = np.full(len(sequences), NONE)
        produced = [NO_TOKENS]
        counts = np.zeros(len(sequences), np.int64)
        for index, sequence in enumerate(sequences):
            offer = self._offers.get(sequence.sequence_id)
            if offer is not None:
                picks[index], counts[index] = offer.place, len(sequence) - offer.length
                produced.append(sequence.tokens[offer.length :])
        return follow(self._drafts, picks, np.concatenate(produced), offsets_of(counts))

    def _limits(self, sequences: SequenceOf[Sequence]) -> list[int]:
        return [min(furthest(self._most(sequence)), sequence.room - 1) for sequence in sequences]


def furthest(max_draft: int) -> int:
    """Most tokens that are worth drafting where a step verifies `max_draft`.

    So many may be verified while that is drafted, the target adds one of its own, and so many may follow.
    """
    return 2 * max_draft + 1 if max_draft else 0
