"""Drafters that read tokens alone, behind the engine's interface.

`ssd.types.Drafter` is told only in `draft` what was committed since its last draft. The engine may skip it for a few
steps; what it has been told so far is recorded here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.drafters.base import Drafts, TargetOutputs
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
            verified=told.verified,
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
            verified=np.array([each.verified for each in told], np.uint32),
            max_draft=np.array(limits, np.uint32),
            cost=cost,
            steps=steps if np.count_nonzero(steps > 1) else None,
        )
        for sequence in sequences:
            self._told[sequence.sequence_id] = Told(len(sequence))
        return progress


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
