"""Shadow mode: drafts that are withheld, and scored against the tokens that come instead.

An engine that verifies drafts requests the next one after the accepted tokens of the last one and one more token. So a
withheld draft is kept until that many tokens have arrived, which are then committed as one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ssd.drafter import SuffixDrafter
from ssd.sequences.running import RunningById
from ssd.types import Progress, offsets_of

SHARE = 0.03
"""Maximum share of the time that is spent on scoring observed requests; a request of 170 output tokens takes 2.5 ms."""
BURST_S = 1.0
"""Time in seconds that may be spent at once after a pause."""

MAX_WAITING = 256
"""Tokens of a sequence that may wait for a step, more than a draft has. If an engine sends more at once, they count as
steps without drafts, so that a message takes a limited time."""

NO_TOKENS = np.empty(0, np.uint32)


@dataclass(slots=True, eq=False)
class Withheld:
    """A sequence whose drafts are withheld."""

    tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    """uint32 [n]: tokens that no step has committed yet."""
    has_draft: bool = False
    """Whether it was drafted for, even if the draft was empty."""
    max_draft: int = 0
    """Maximum length of its next draft."""


class Step(NamedTuple):
    """Tokens that a sequence commits together."""

    tokens: int
    """Number of tokens."""
    steps: int
    """Number of steps that a target needs for them; the draft is verified in the first."""


class ShadowDrafter:
    """Requests drafts as an engine that verifies them does; the result is in the drafter's `stats`."""

    def __init__(self, drafter: SuffixDrafter) -> None:
        self.drafter = drafter
        self._sequences: dict[int, Withheld] = {}

    @property
    def running(self) -> RunningById:
        """The running sequences."""
        return self.drafter.running

    def begin(self, sequence_id: int, prompt: np.ndarray, **options: Any) -> None:
        """Begin a sequence, see `CorpusDrafter.begin`."""
        self.drafter.begin(sequence_id, prompt, **options)
        self._sequences[sequence_id] = Withheld()

    def advance(self, batch: Progress) -> None:
        """Add the tokens of a batch of these sequences, and make the steps whose outcomes they decide.

        `verified`, `steps` and `step_times` of the batch have no effect.
        """
        ids, bounds = batch.sequence_ids.tolist(), batch.offsets.tolist()
        for index, (sequence_id, limit) in enumerate(zip(ids, batch.max_draft.tolist(), strict=True)):
            sequence = self._sequences[sequence_id]
            sequence.tokens = np.concatenate([sequence.tokens, batch.tokens[bounds[index] : bounds[index + 1]]])
            sequence.max_draft = limit
        while decided := {each: step for each in ids if (step := self._next_step(each)) is not None}:
            self._commit(decided, batch)
            ids = list(decided)

    def finish(self, sequence_id: int, tokens: np.ndarray, *, learn: bool) -> None:
        """End a sequence; tokens: uint32 [n], those since its last batch. learn: see `CorpusDrafter.finish`."""
        if len(tokens):
            limit = self._sequences[sequence_id].max_draft
            self.advance(Progress.of_one(sequence_id, tokens, max_draft=limit))
        rest = self._sequences.pop(sequence_id).tokens
        verified = self._offered(sequence_id) if len(rest) else 0
        self.drafter.finish(sequence_id, rest, verified=verified, learn=learn)

    def size_of(self, sequence_id: int) -> int:
        """Return the number of tokens of a sequence, prompt included."""
        return self.drafter.running.size_of(sequence_id) + len(self._sequences[sequence_id].tokens)

    def _next_step(self, sequence_id: int) -> Step | None:
        """Return the next step of a sequence, without tokens before its first draft; None if it is not decided yet."""
        sequence = self._sequences[sequence_id]
        size = len(sequence.tokens)
        if not size:
            return None if sequence.has_draft else Step(0, 1)
        offered = self._offered(sequence_id)
        accepted = self.drafter.running.accepted(sequence_id, sequence.tokens[: offered + 1], offered)
        if size > MAX_WAITING:
            return Step(size, size - accepted)
        return Step(accepted + 1, 1) if accepted < size else None

    def _commit(self, steps: dict[int, Step], batch: Progress) -> None:
        """Commit a step of each sequence, and draft for the next one; batch: where their tokens came from."""
        ids, sizes = list(steps), [step.tokens for step in steps.values()]
        sequences = [self._sequences[sequence_id] for sequence_id in ids]
        progress = Progress(
            sequence_ids=np.array(ids, np.uint64),
            tokens=np.concatenate([each.tokens[:size] for each, size in zip(sequences, sizes, strict=True)]),
            offsets=offsets_of(np.array(sizes, np.uint32)),
            verified=self.drafter.running.offered_to(ids).astype(np.uint32),
            max_draft=np.array([each.max_draft for each in sequences], np.uint32),
            cost=batch.cost,
            steps=np.array([step.steps for step in steps.values()], np.uint32),
            other_tokens=batch.other_tokens,
            other_sequences=batch.other_sequences,
            min_path_prob=batch.min_path_prob,
        )
        self.drafter.draft(progress)
        self.drafter.running.record_use()
        for each, size in zip(sequences, sizes, strict=True):
            each.tokens, each.has_draft = each.tokens[size:], True

    def _offered(self, sequence_id: int) -> int:
        return int(self.drafter.running.offered_to([sequence_id])[0])


class TimeBudget:
    """Limits an activity to `SHARE` of the time. Unspent time is kept, up to `BURST_S`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._left_s, self._at = BURST_S, clock()

    def is_left(self) -> bool:
        """Return whether the activity may run now."""
        now = self._clock()
        self._left_s = min(BURST_S, self._left_s + SHARE * (now - self._at))
        self._at = now
        return self._left_s > 0

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Count the time of the block."""
        began = self._clock()
        try:
            yield
        finally:
            self._left_s -= self._clock() - began
