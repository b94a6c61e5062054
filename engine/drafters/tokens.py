"""Adapt drafters that only read tokens to the engine's drafter interface.

`ssd.types.Drafter.draft` takes the tokens committed since the previous call. The engine may skip calls for several
steps, so the adapter records how much of each sequence has been reported and what happened to the last draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.drafters.base import Drafts, TargetOutputs
from ssd import types
from ssd.budget.token_budget import StepPrice
from ssd.types import NO_LIMITS, DraftBatch, DraftLimits, Progress, offsets_of

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from engine.drafters.base import Drafter
    from engine.scheduling.plan import StepPlan, StepResult
    from engine.scheduling.sequence import Sequence

UNMEASURED = 0.03
"""Minimum path probability of draft tokens in an engine that does not measure its steps, and verifies all of them."""


@dataclass(slots=True)
class Reported:
    """Tokens of one sequence that were reported to the drafter, and the steps since then."""

    tokens: int
    """Number of leading tokens of the sequence that were reported."""
    steps: int = 0
    """Number of steps that have produced tokens since the last report."""
    verified: int = 0
    """Number of draft tokens that the first of those steps verified."""


class TokenDrafter:
    """Adapts a drafter of tokens to the engine's interface."""

    needs = TargetOutputs()

    def __init__(self, drafter: types.Drafter) -> None:
        self.inner = drafter
        self.limits = limits_of(drafter)
        self._reported: dict[int, Reported] = {}
        self._taken = signature(drafter.start).parameters

    def start(self, sequence: Sequence) -> None:
        """See `engine.drafters.base.Drafter.start`."""
        request = sequence.request
        names = ("hints", "adapter", "request_id", "learn", "rollout", "seed")
        known: dict[str, Any] = {name: getattr(request, name) for name in names}
        given = {name: value for name, value in known.items() if name in self._taken and value is not None}
        self.inner.start(sequence.sequence_id, request.prompt, **given)
        self._reported[sequence.sequence_id] = Reported(len(request.prompt))

    def propose(self, plan: StepPlan) -> Drafts:
        """Report committed tokens and return drafts; sequences whose `start` failed get empty drafts."""
        entries = plan.producing
        at = [index for index, entry in enumerate(entries) if entry.sequence.sequence_id in self._reported]
        if not at:
            return Drafts.empty(len(entries))
        started = [entries[index] for index in at]
        limits = [entry.draft_room for entry in started]
        batch = self.inner.draft(self._progress([entry.sequence for entry in started], limits, plan.price))
        return Drafts(batch if len(started) == len(entries) else batch.scatter(np.array(at), len(entries)))

    @property
    def can_draft_after(self) -> bool:
        """Whether the drafter can draft after tokens that are not committed."""
        return hasattr(self.inner, "draft_after")

    def draft_after(self, plan: StepPlan, indices: SequenceOf[int], runs: SequenceOf[np.ndarray]) -> DraftBatch:
        """Return a draft after each run of tokens, uint32, as if it had been committed.

        indices: of the sequence of each run within `plan.producing`, after `propose` was called for the plan.
        """
        entries = [plan.producing[index] for index in indices]
        started = [at for at, entry in enumerate(entries) if entry.sequence.sequence_id in self._reported]
        if not started:
            return DraftBatch.empty(len(entries))
        rooms = [max(0, entries[at].draft_room - len(runs[at])) for at in started]
        drafter: Any = self.inner
        batch = drafter.draft_after(
            Progress(
                sequence_ids=np.array([entries[at].sequence.sequence_id for at in started], np.uint64),
                tokens=np.concatenate([runs[at] for at in started]),
                offsets=offsets_of(np.array([len(runs[at]) for at in started])),
                verified=np.zeros(len(started), np.uint32),
                max_draft=np.array(rooms, np.uint32),
                min_path_prob=UNMEASURED if plan.price is None else plan.price.min_path_prob,
            )
        )
        return batch.scatter(np.array(started), len(entries))

    def observe(self, result: StepResult) -> None:
        """Record how much of the last drafts was verified."""
        for each in result.results:
            reported = self._reported.get(each.sequence_id)
            if reported is None or not len(each.tokens):
                continue
            if reported.steps == 0:
                reported.verified = each.drafted
            reported.steps += 1

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """See `engine.drafters.base.Drafter.finish`."""
        if sequence.sequence_id not in self._reported:
            return
        try:
            if self._reported[sequence.sequence_id].steps > 1:
                # `ssd.types.Drafter.finish` has no argument for the number of steps, so report them first.
                self.inner.draft(self._progress([sequence], [0], None))
        finally:
            reported = self._reported.pop(sequence.sequence_id)
            rest = sequence.tokens[reported.tokens :]
            self.inner.finish(sequence.sequence_id, rest, verified=reported.verified, learn=learn)

    def close(self) -> None:
        """See `engine.drafters.base.Drafter.close`."""
        self.inner.close()

    def _progress(self, sequences: SequenceOf[Sequence], limits: SequenceOf[int], price: StepPrice | None) -> Progress:
        """Return the unreported tokens of these sequences, and mark them as reported."""
        reported = [self._reported[sequence.sequence_id] for sequence in sequences]
        added = [sequence.tokens[each.tokens :] for sequence, each in zip(sequences, reported, strict=True)]
        steps = np.array([each.steps for each in reported], np.uint32)
        progress = Progress(
            sequence_ids=np.array([sequence.sequence_id for sequence in sequences], np.uint64),
            tokens=np.concatenate(added),
            offsets=offsets_of(np.array([len(tokens) for tokens in added])),
            verified=np.array([each.verified for each in reported], np.uint32),
            max_draft=np.array(limits, np.uint32),
            min_path_prob=UNMEASURED if price is None else price.min_path_prob,
            steps=steps if np.count_nonzero(steps > 1) else None,
        )
        for sequence in sequences:
            self._reported[sequence.sequence_id] = Reported(len(sequence))
        return progress


def adapt(drafter: Drafter | types.Drafter) -> Drafter:
    """Return a drafter with the engine's interface; a drafter of tokens is wrapped."""
    either: Any = drafter
    return either if hasattr(either, "observe") else TokenDrafter(either)


def innermost(drafter: object) -> object:
    """Return the drafter inside the engine's wrappers."""
    while (inner := getattr(drafter, "inner", None)) is not None:
        drafter = inner
    return drafter


def limits_of(drafter: Drafter | types.Drafter) -> DraftLimits:
    """Return the limits that a drafter declares."""
    limits: DraftLimits = getattr(drafter, "limits", NO_LIMITS)
    return limits
