"""Adapt drafters that only read tokens to the engine's drafter interface.

`ssd.types.Drafter.draft` takes the tokens committed since the previous call. The engine may skip calls for several
steps, so the adapter records how much of each sequence has been reported and what happened to the last draft.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.drafters.base import Drafter
from engine.drafters.by_adapter import AdapterDrafters
from engine.drafters.drafts import Drafts
from engine.scheduling.table import LENGTH, MAX_DRAFT, SEQUENCE_ID, TEXT
from ssd import types
from ssd.errors import UserError
from ssd.kernels.jit import IntPair, LongRows, Longs, Nothing, TokenRows, Tokens, TokensOut, Ulongs, kernel, peek
from ssd.types import DraftBatch, Progress, offsets_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as SequenceOf

    from engine.scheduling.plan import StepPlan
    from engine.scheduling.result import StepResult
    from engine.scheduling.sequence import Sequence
    from ssd.corpus.corpus import Corpus

UNMEASURED = 0.03
"""Minimum path probability of draft tokens in an engine that does not measure its steps, and verifies all of them."""
DETAILS = "hints", "adapter", "request_id", "learn", "rollout", "seed"
"""Fields of a request that `start` of a drafter may take."""
BYTES = 4
"""Size of a token."""

# Columns of what was reported of each row of the table of requests.
TOKENS, STEPS, VERIFIED = range(3)
"""Number of leading tokens of a sequence that were reported, or NOT_STARTED; number of steps that have produced tokens
since then; number of draft tokens that the first of those steps verified."""
NOT_STARTED = -1
OFFSETS, OWN_VERIFIED, OWN_ROOM, OWN_STEPS = range(4)
"""Rows of the counts that `report` writes: offsets of each sequence's tokens; its number of verified draft tokens; the
largest number of its draft tokens; number of its steps."""
COUNTS = 4


class TokenDrafter(Drafter):
    """Adapts a drafter of tokens to the engine's interface."""

    def __init__(self, drafter: types.Drafter) -> None:
        self.inner = drafter
        self.limits = drafter.limits
        self._reported = np.zeros((0, 3), np.int64)
        """int64 [rows of the table, 3]."""
        self._details = tuple(name for name in DETAILS if name in signature(drafter.start).parameters)

    @property
    def origin(self) -> type:
        """See `Drafter`."""
        return type(self.inner)

    @property
    def is_connected(self) -> bool | None:
        """See `Drafter`."""
        return self.inner.is_connected

    def corpora(self, adapter: str | None = None) -> Iterable[Corpus]:
        """See `Drafter`."""
        owner = self.inner.known(adapter) if isinstance(self.inner, AdapterDrafters) else self.inner
        return () if owner is None or owner.corpus is None else (owner.corpus,)

    def start(self, sequence: Sequence) -> None:
        """See `Drafter.start`."""
        request = sequence.request
        given: dict[str, Any] = {name: getattr(request, name) for name in self._details}
        given = {name: value for name, value in given.items() if value is not None}
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
        batch = self.inner.draft_after(
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
        """See `Drafter.finish`."""
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
        """See `Drafter.close`."""
        self.inner.close()


def adapt(drafter: Drafter | types.Drafter) -> Drafter:
    """Return a drafter with the engine's interface; a drafter of tokens is wrapped.

    Raises UserError for a drafter with neither interface.
    """
    if isinstance(drafter, Drafter):
        return drafter
    if isinstance(drafter, types.Drafter):
        return TokenDrafter(drafter)
    name = type(drafter).__qualname__
    raise UserError(f"the drafter {name} must inherit from ssd.Drafter or from engine.drafters.base.Drafter")


@kernel(LongRows, LongRows, Longs, Longs, Longs, Ulongs, Longs, TokenRows, returns=IntPair)
def report(state, reported, rows, rooms, at, ids, addresses, counts):
    """Write the arguments of a call for the sequences of B rows that are started and may be drafted, N of them.

    rows, rooms: int64 [B], rows of the table, and largest number of draft tokens of each. Writes their indices to `at`,
    int64 [B], their ids, the addresses of their unreported tokens, and `counts`, uint32 [COUNTS, B + 1], and counts the
    tokens as reported. Returns N, and the largest number of steps.
    """
    count = most = 0
    counts[OFFSETS, 0] = 0
    for index in range(len(rows)):
        row, own = state[rows[index]], reported[rows[index]]
        if own[TOKENS] == NOT_STARTED or row[MAX_DRAFT] == 0:
            continue
        at[count] = index
        ids[count] = row[SEQUENCE_ID]
        addresses[count] = row[TEXT] + BYTES * own[TOKENS]
        counts[OFFSETS, count + 1] = counts[OFFSETS, count] + row[LENGTH] - own[TOKENS]
        counts[OWN_VERIFIED, count] = own[VERIFIED]
        counts[OWN_ROOM, count] = rooms[index]
        counts[OWN_STEPS, count] = own[STEPS]
        most = max(most, own[STEPS])
        own[TOKENS], own[STEPS], own[VERIFIED] = row[LENGTH], 0, 0
        count += 1
    return count, most


@kernel(Longs, Tokens, TokensOut, returns=Nothing)
def copy_tokens(addresses, offsets, tokens):
    """Copy runs of tokens to `tokens`, one after the other. addresses: int64 [B]. offsets: uint32 [B + 1]."""
    for index in range(len(addresses)):
        for place in range(offsets[index], offsets[index + 1]):
            tokens[place] = peek(addresses[index], place - np.int64(offsets[index]))


@kernel(LongRows, Longs, Longs, Longs, returns=Nothing)
def note_step(reported, rows, produced, verified):
    """Count a step of sequences. produced, verified: int64 [B], numbers of committed and of verified draft tokens."""
    for index in range(len(rows)):
        own = reported[rows[index]]
        if produced[index] == 0 or own[TOKENS] == NOT_STARTED:
            continue
        if own[STEPS] == 0:
            own[VERIFIED] = verified[index]
        own[STEPS] += 1
