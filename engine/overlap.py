"""Drafting beside the forward, so that the engine seldom waits for its drafter.

While a step runs, the drafter is asked for what follows the text that the step began with, further than the step itself
verifies. When the step's tokens are known, a draft that begins with them is a draft for the next step, less those
tokens: it was prepared. Only for sequences that have none does the engine wait, as in the plain loop:

    step 1    waits for    t0 t1 t2 t3 t4 t5 t6 ...    verifies t0 t1 t2, commits t0 t1 t2 t3
    step 2    has                      t4 t5 t6 ...    verifies t4 t5 t6; meanwhile the drafter learns of t0 to t3 and
                                                       drafts t4 t5 t6 t7 t8 ..., of which step 3 has what follows

Outputs do not depend on drafts, so they are the same as in the plain loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from engine.budget import Budget
from engine.config import EngineConfig
from engine.drafting import Drafting
from engine.sequence import NO_TOKENS, Sequence
from ssd.draft import DraftBatch, Drafter, offsets_of
from ssd.follow import NONE, count_shared, follow

NO_DRAFTS = DraftBatch.empty(0)


class Offer(NamedTuple):
    """A draft that a sequence may draw on."""

    place: int
    """Within the drafts of the last step, and behind those the drafts that were asked for beside it."""
    length: int
    """How many tokens the sequence had when it was made."""


class Asked(NamedTuple):
    """Drafts that are made beside a forward."""

    sequences: list[Sequence]
    rows: np.ndarray
    """int64 [B]: which of the last step's drafts they draw on."""
    drafts: Future[DraftBatch]


class OverlappedDrafting(Drafting):
    """Asks while the step before runs. A thread of its own uses the drafter, or nobody else does."""

    def __init__(self, drafter: Drafter, config: EngineConfig, vocab_size: int, budget: Budget | None = None) -> None:
        """As `Drafting`."""
        super().__init__(drafter, config, vocab_size, budget)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drafting")
        self._tasks: deque[Future[Any]] = deque()
        """What the thread has been given to do and nobody has seen done."""
        self._cost: float | None = None
        self._drafts = NO_DRAFTS
        """Of the last step, uncut."""
        self._asked: Asked | None = None
        self._offers: dict[int, Offer] = {}
        """By sequence; one that was not in the last step has none."""

    def look_ahead(self, sequences: SequenceOf[Sequence]) -> None:
        """Ask for what follows the text of those that draw on a draft for a shorter one."""
        self._ask_beside([one for one in sequences if one.completes_prompt and one.told < len(one)])

    def look_back(self, sequences: SequenceOf[Sequence]) -> None:
        """Ask for those that have no draft to draw on, before anything else is done with what they produced."""
        self._see_done()
        running = [sequence for sequence in sequences if sequence.sequence_id in self._offers]
        self._use(running, self._left_for(running))
        self._ask_beside([running[index] for index in self._lacking(running)])

    def close(self) -> None:
        """Release the thread and the drafter."""
        self._thread.shutdown()
        super().close()
        self._see_done()

    def _start(self, sequence: Sequence) -> None:
        self._do(self._drafter.start, sequence.sequence_id, sequence.request.prompt)

    def _finish(self, sequence: Sequence, learn: bool) -> None:
        self._offers.pop(sequence.sequence_id, None)
        self._do(self._finish_in_turn, sequence, learn, self._asked, self._drafts)

    def _finish_in_turn(self, sequence: Sequence, learn: bool, asked: Asked | None, drafts: DraftBatch) -> None:
        if asked is not None and sequence in asked.sequences:
            _count_own(asked, [asked.sequences.index(sequence)], drafts)
        super()._finish(sequence, learn)

    def _drafts_for(self, sequences: SequenceOf[Sequence], cost: float | None) -> DraftBatch:
        self._cost = cost
        self._see_done()
        self._use(sequences, self._left_for(sequences))
        lacking = self._lacking(sequences)
        if lacking:
            fresh = self._ask_now([sequences[index] for index in lacking])
            picks = np.arange(len(sequences))
            picks[lacking] = len(sequences) + np.arange(len(lacking))
            self._use(sequences, _select(DraftBatch.joined([self._drafts, fresh]), picks))
        return self._drafts

    def _use(self, sequences: SequenceOf[Sequence], drafts: DraftBatch) -> None:
        """From now on these draw on these drafts, which follow their whole text."""
        self._drafts = drafts
        self._offers = {one.sequence_id: Offer(place, len(one)) for place, one in enumerate(sequences)}

    def _lacking(self, sequences: SequenceOf[Sequence]) -> list[int]:
        """Which of those that draw on `_drafts`, in their order, could use more than those hold."""
        sizes = (self._drafts.offsets[1:] - self._drafts.offsets[:-1]).tolist()
        return [
            index
            for index, (sequence, size) in enumerate(zip(sequences, sizes, strict=True))
            if _may_ask(sequence) and size < min(self._most(sequence), sequence.room - 1)
        ]

    def _ask_beside(self, sequences: list[Sequence]) -> None:
        """Have drafts made while something else is done."""
        if not sequences:
            return
        rows = np.array([self._offers[sequence.sequence_id].place for sequence in sequences])
        self._asked = Asked(sequences, rows, self._do(self._drafter.draft, self._progress(sequences, self._cost)))
        for place, sequence in enumerate(sequences, len(self._drafts)):
            self._offers[sequence.sequence_id] = Offer(place, len(sequence))

    def _left_for(self, sequences: SequenceOf[Sequence]) -> DraftBatch:
        """What is left for each sequence of the draft that it may draw on."""
        at_hand = self._drafts
        if self._asked is not None:
            at_hand = DraftBatch.joined([at_hand, self._asked.drafts.result()])
            running = [index for index, one in enumerate(self._asked.sequences) if one.sequence_id in self._offers]
            _count_own(self._asked, running, self._drafts)
            self._asked = None
        picks = np.full(len(sequences), NONE)
        produced = []
        for index, sequence in enumerate(sequences):
            offer = self._offers.get(sequence.sequence_id)
            if offer is not None:
                picks[index] = offer.place
            produced.append(NO_TOKENS if offer is None else sequence.tokens[offer.length :])
        offsets = offsets_of(np.array([len(tokens) for tokens in produced]))
        return follow(at_hand, picks, np.concatenate([NO_TOKENS, *produced]), offsets)

    def _limit_of_asking(self, sequence: Sequence) -> int:
        # So much may be verified, another token is the target's own, and so much may be verified behind it.
        most = self._most(sequence)
        return min(2 * most + 1 if most else 0, sequence.room - 1)

    def _ask_now(self, sequences: SequenceOf[Sequence]) -> DraftBatch:
        progress = self._progress(sequences, self._cost)
        # Handing over takes as long as drafting for one sequence.
        return self._do(self._drafter.draft, progress).result() if self._tasks else self._drafter.draft(progress)

    def _do(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        task = self._thread.submit(call, *arguments)
        self._tasks.append(task)
        return task

    def _see_done(self) -> None:
        """Forget what is done; raises what went wrong there."""
        while self._tasks and self._tasks[0].done():
            self._tasks.popleft().result()


def _may_ask(sequence: Sequence) -> bool:
    """Whether the drafter was not asked for what follows this text."""
    return sequence.told < len(sequence) or sequence.steps == 0


def _select(drafts: DraftBatch, picks: np.ndarray) -> DraftBatch:
    """Some of them, int64 [B], in another order."""
    return follow(drafts, picks, NO_TOKENS, np.zeros(len(picks) + 1, np.uint32))


def _count_own(asked: Asked, indices: list[int], drafts: DraftBatch) -> None:
    """What is told of some of those asked for: the drafter hears of its own last draft.

    That was made beside a step that verified another one, for the same text. What they have in common was verified.
    """
    shared = count_shared(asked.drafts.result(), np.array(indices, np.int64), drafts, asked.rows[indices])
    for index, count in zip(indices, shared.tolist(), strict=True):
        sequence = asked.sequences[index]
        sequence.last_verified = min(sequence.last_verified, count)
        sequence.last_accepted = min(sequence.last_accepted, count)
