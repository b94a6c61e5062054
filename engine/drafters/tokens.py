"""Drafters that read tokens alone, behind the engine's interface.

`ssd.types.Drafter` is told only in `draft` what was committed since its last draft. The engine may skip it for a few
steps; what it has been told so far is recorded here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.drafters.base import Drafts, TargetOutputs
from engine.drafters.outcomes import OutcomeTable
from engine.speculation.draft_tree import straight_length
from ssd import types
from ssd.types import DraftBatch, Progress, offsets_of

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from engine.drafters.base import Drafter
    from engine.scheduling.plan import SequencePlan, StepPlan, StepResult
    from engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class Told:
    """What a drafter knows of a sequence."""

    tokens: int
    """Leading tokens of the sequence that it was told of."""
    steps: int = 0
    """Steps that have produced tokens since then."""
    verified: int = 0
    """Draft tokens that the first of those steps verified."""
    path: np.ndarray | None = None
    """uint32: the last draft, if it was made with a step in flight, so that steps verify only a part of it."""

    def verified_of(self, committed: np.ndarray) -> int:
        """Return how many tokens of the last draft the target has judged; `committed`: tokens since that draft.

        With a step in flight the target verifies other drafts as well, but the committed tokens judge this one: the
        tokens that agree, and the first one that does not.
        """
        if self.path is None:
            return self.verified
        shared = shared_length(self.path, committed)
        return min(len(self.path), len(committed), shared + 1)


class TokenDrafter:
    """Adapts a drafter of tokens to the engine's interface."""

    needs = TargetOutputs()

    def __init__(self, drafter: types.Drafter) -> None:
        self.inner = drafter
        self._told: dict[int, Told] = {}

    def start(self, sequence: Sequence) -> None:
        """See `engine.drafters.base.Drafter.start`."""
        prompt = sequence.request.prompt
        self.inner.start(sequence.sequence_id, prompt)
        self._told[sequence.sequence_id] = Told(len(prompt))

    def propose(self, plan: StepPlan) -> Drafts:
        """Report what was committed since the last call, and return drafts; none where `start` has failed."""
        entries = plan.producing
        known = [entry for entry in entries if entry.sequence.sequence_id in self._told]
        if not known:
            return Drafts.empty(len(entries))
        limits = [entry.draft_room for entry in known]
        batch = self.inner.draft(self._progress([entry.sequence for entry in known], limits, plan.cost))
        return Drafts(batch if len(known) == len(entries) else _spread(batch, entries, self._told))

    def propose_after(self, plan: StepPlan) -> OutcomeTable:
        """Report what is committed, and draft for the likeliest outcome of the step in flight.

        The drafter continues the committed text, further than one step verifies. The outcome is where its draft leaves
        the one in flight: the tokens that they share, and the next one.
        """
        known = [entry for entry in plan.producing if entry.sequence.sequence_id in self._told]
        width = max((entry.draft_room for entry in plan.producing), default=0)
        table = OutcomeTable.empty(len(plan.producing), 1, width)
        if not known or not width:
            return table
        limits = [_ahead(entry) + entry.draft_room if entry.draft_room else 0 for entry in known]
        batch = self.inner.draft(self._progress([entry.sequence for entry in known], limits, plan.cost))
        places = {id(entry): place for place, entry in enumerate(plan.producing)}
        for index, entry in enumerate(known):
            start = int(batch.offsets[index])
            path = slice(start, start + straight_length(batch.parents_of(index)))
            self._told[entry.sequence.sequence_id].path = batch.tokens[path]
            _fill_outcome(table, places[id(entry)], entry, batch, path)
        return table

    def observe(self, result: StepResult) -> None:
        """Record what became of the last drafts."""
        for each in result.results:
            told = self._told.get(each.sequence_id)
            if told is None or not len(each.tokens):
                continue
            if told.steps == 0:
                told.verified = each.drafted
            told.steps += 1

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """See `engine.drafters.base.Drafter.finish`."""
        if sequence.sequence_id not in self._told:
            return
        if self._told[sequence.sequence_id].steps > 1:
            # `ssd.types.Drafter.finish` takes no number of steps, so they are reported before it.
            self.inner.draft(self._progress([sequence], [0], None))
        told = self._told.pop(sequence.sequence_id)
        self.inner.finish(
            sequence.sequence_id,
            sequence.tokens[told.tokens :],
            verified=told.verified_of(sequence.tokens[told.tokens :]),
            learn=learn,
        )

    def close(self) -> None:
        """See `engine.drafters.base.Drafter.close`."""
        self.inner.close()

    def _progress(self, sequences: SequenceOf[Sequence], limits: SequenceOf[int], cost: float | None) -> Progress:
        """What the drafter has not been told of these sequences; it counts as told from here on."""
        told = [self._told[sequence.sequence_id] for sequence in sequences]
        untold = [sequence.tokens[each.tokens :] for sequence, each in zip(sequences, told, strict=True)]
        steps = np.array([each.steps for each in told], np.uint32)
        progress = Progress(
            sequence_ids=np.array([sequence.sequence_id for sequence in sequences], np.uint64),
            tokens=np.concatenate(untold),
            offsets=offsets_of(np.array([len(tokens) for tokens in untold])),
            verified=np.array([each.verified_of(tokens) for each, tokens in zip(told, untold, strict=True)], np.uint32),
            max_draft=np.array(limits, np.uint32),
            cost=cost,
            steps=steps if np.count_nonzero(steps > 1) else None,
        )
        for sequence in sequences:
            self._told[sequence.sequence_id] = Told(len(sequence))
        return progress


def _ahead(entry: SequencePlan) -> int:
    """Return the largest number of tokens that the step in flight commits."""
    return 0 if entry.in_flight_draft is None else len(entry.in_flight_draft) + 1


def _fill_outcome(table: OutcomeTable, place: int, entry: SequencePlan, batch: DraftBatch, path: slice) -> None:
    """Write the draft after the outcome that a path is right for."""
    tokens, shared = batch.tokens[path], -1
    if entry.in_flight_draft is None:
        table.accepted[place], table.bonus[place] = 0, entry.sequence.tokens[-1]
    else:
        shared = shared_length(tokens, entry.in_flight_draft)
        if shared == len(tokens):
            return
        table.accepted[place], table.bonus[place] = shared, tokens[shared]
    rest = slice(path.start + shared + 1, min(path.stop, path.start + shared + 1 + entry.draft_room))
    size = max(0, rest.stop - rest.start)
    table.lengths[place] = size
    table.tokens[place, 0, :size] = batch.tokens[rest]
    table.accept_prob[place, 0, :size] = batch.accept_prob[rest]
    table.source[place, 0, :size] = batch.source[rest]


def shared_length(left: np.ndarray, right: np.ndarray) -> int:
    """Return the number of leading tokens that two texts share."""
    size = min(len(left), len(right))
    return int(np.append(left[:size] != right[:size], True).argmax())


def adapt(drafter: Drafter | types.Drafter) -> Drafter:
    """Return a drafter with the engine's interface, whichever of the two interfaces this one has."""
    either: Any = drafter
    return either if hasattr(either, "observe") else TokenDrafter(either)


def innermost(drafter: object) -> object:
    """Return the drafter inside the engine's wrappers."""
    while (inner := getattr(drafter, "inner", None)) is not None:
        drafter = inner
    return drafter


def _spread(batch: DraftBatch, entries: SequenceOf[SequencePlan], known: dict[int, Told]) -> DraftBatch:
    """Drafts of the known sequences as drafts of all entries: the others get none."""
    lengths = np.zeros(len(entries), np.uint32)
    lengths[[entry.sequence.sequence_id in known for entry in entries]] = np.diff(batch.offsets)
    return DraftBatch(batch.tokens, batch.parents, batch.accept_prob, batch.source, offsets_of(lengths))
