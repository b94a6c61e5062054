"""Adapt drafters that only read tokens to the engine's drafter interface.

`ssd.types.Drafter.draft` takes the tokens committed since the previous call. The engine may skip calls for several
steps, so the adapter records how much of each sequence has been reported and what happened to the last draft.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.drafters.base import TargetOutputs
from engine.drafters.drafts import Drafts
from engine.drafters.reports import (
    COUNTS,
    NOT_STARTED,
    OFFSETS,
    OWN_ROOM,
    OWN_STEPS,
    OWN_VERIFIED,
    TOKENS,
    copy_tokens,
    note_step,
    report,
)
from engine.scheduling.table import SEQUENCE_ID
from ssd import types
from ssd.types import NO_LIMITS, DraftBatch, DraftLimits, Progress, offsets_of

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from engine.drafters.base import Drafter
    from engine.scheduling.plan import StepPlan
    from engine.scheduling.result import StepResult
    from engine.scheduling.sequence import Sequence

UNMEASURED = 0.03
"""Minimum path probability of draft tokens in an engine that does not measure its steps, and verifies all of them."""


class TokenDrafter:
    """Adapts a drafter of tokens to the engine's interface."""

    needs = TargetOutputs()

    def __init__(self, drafter: types.Drafter) -> None:
        self.inner = drafter
        self.limits = limits_of(drafter)
        self._reported = np.zeros((0, 3), np.int64)
        """int64 [rows of the table, 3]."""
        self._taken = signature(drafter.start).parameters

    def start(self, sequence: Sequence) -> None:
        """See `engine.drafters.base.Drafter.start`."""
        request = sequence.request
        names = ("hints", "adapter", "request_id", "learn", "rollout", "seed")
        known: dict[str, Any] = {name: getattr(request, name) for name in names}
        given = {name: value for name, value in known.items() if name in self._taken and value is not None}
        self.inner.start(sequence.sequence_id, request.prompt, **given)
        self._make_room(sequence.row + 1)
        self._reported[sequence.row] = len(request.prompt), 0, 0

    def propose(self, plan: StepPlan) -> Drafts:
        """Report committed tokens and return drafts.

        Sequences whose requests want no drafts, and those whose `start` failed, get empty ones.
        """
        table, rows = plan.table, plan.rows
        self._make_room(len(table.state))
        at, addresses = np.empty((2, len(rows)), np.int64)
        ids, counts = np.empty(len(rows), np.uint64), np.empty((COUNTS, len(rows) + 1), np.uint32)
        count, most_steps = report(table.state, self._reported, rows, plan.rooms, at, ids, addresses, counts)
        if not count:
            return Drafts.empty(len(rows))
        offsets = counts[OFFSETS, : count + 1]
        tokens = np.empty(int(offsets[-1]), np.uint32)
        copy_tokens(addresses[:count], offsets, tokens)
        batch = self.inner.draft(
            Progress(
                sequence_ids=ids[:count],
                tokens=tokens,
                offsets=offsets,
                verified=counts[OWN_VERIFIED, :count],
                max_draft=counts[OWN_ROOM, :count],
                min_path_prob=UNMEASURED if plan.price is None else plan.price.min_path_prob,
                steps=counts[OWN_STEPS, :count] if most_steps > 1 else None,
            )
        )
        return Drafts(batch if count == len(rows) else batch.scatter(at[:count], len(rows)))

    def _make_room(self, rows: int) -> None:
        """Have a row in `_reported` for each of the table."""
        if rows > len(self._reported):
            more = np.full((rows - len(self._reported), 3), NOT_STARTED, np.int64)
            self._reported = np.concatenate((self._reported, more))

    def _started(self, rows: np.ndarray) -> np.ndarray:
        """Return the indices of the rows whose sequences the drafter has started, int64 [n]."""
        self._make_room(int(rows.max(initial=-1)) + 1)
        return np.flatnonzero(self._reported[rows, TOKENS] != NOT_STARTED)

    @property
    def can_draft_after(self) -> bool:
        """Whether the drafter can draft after tokens that are not committed."""
        return hasattr(self.inner, "draft_after")

    def draft_after(self, plan: StepPlan, indices: SequenceOf[int], runs: SequenceOf[np.ndarray]) -> DraftBatch:
        """Return a draft after each run of tokens, uint32, as if it had been committed.

        indices: of the sequence of each run within `plan.producing`, after `propose` was called for the plan.
        """
        at = np.array(indices, np.int64)
        started = self._started(plan.rows[at])
        if not len(started):
            return DraftBatch.empty(len(at))
        chosen = [runs[index] for index in started.tolist()]
        sizes = np.array([len(run) for run in chosen])
        rooms = np.maximum(0, plan.rooms[at[started]] - sizes)
        drafter: Any = self.inner
        batch = drafter.draft_after(
            Progress(
                sequence_ids=plan.table.state[plan.rows[at[started]], SEQUENCE_ID].astype(np.uint64),
                tokens=np.concatenate(chosen),
                offsets=offsets_of(sizes),
                verified=np.zeros(len(started), np.uint32),
                max_draft=rooms.astype(np.uint32),
                min_path_prob=UNMEASURED if plan.price is None else plan.price.min_path_prob,
            )
        )
        return batch.scatter(started, len(at))

    def observe(self, result: StepResult) -> None:
        """Record how much of the last drafts was verified."""
        rows = result.plan.rows
        self._make_room(int(rows.max(initial=-1)) + 1)
        note_step(self._reported, rows, result.lengths, result.verified)

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """See `engine.drafters.base.Drafter.finish`."""
        self._make_room(sequence.row + 1)
        reported, steps, verified = self._reported[sequence.row].tolist()
        if reported == NOT_STARTED:
            return
        rest, sequence_id = sequence.tokens[reported:], sequence.sequence_id
        self._reported[sequence.row] = NOT_STARTED
        try:
            if steps > 1:
                # `ssd.types.Drafter.finish` has no argument for the number of steps, so report them first.
                before = Progress.of_one(sequence_id, rest, verified=verified, steps=steps)
                rest, verified = rest[:0], 0
                self.inner.draft(before)
        finally:
            self.inner.finish(sequence_id, rest, verified=verified, learn=learn)

    def close(self) -> None:
        """See `engine.drafters.base.Drafter.close`."""
        self.inner.close()


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
