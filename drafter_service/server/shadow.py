"""Shadow mode: drafts that are withheld, and scored against the tokens that come instead.

An engine that verifies drafts requests the next one after the accepted tokens of the last one and one more token. So a
withheld draft is kept until that many tokens have arrived, which are then committed as one step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ssd.drafter import SuffixDrafter
from ssd.types import DraftBatch, Progress, offsets_of

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


class ShadowDrafter(SuffixDrafter):
    """Returns empty drafts, and commits tokens in the steps of an engine that verifies those that it withholds.

    `stats` counts these steps. `steps` of batches and finishes, and `verified` of finishes, have no effect.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        """See `SuffixDrafter`."""
        super().__init__(*given, **options)
        self._withheld = defaultdict[int, Withheld](Withheld)
        """By sequence, from its first batch on."""

    def draft_unpublished(self, progress: Progress) -> DraftBatch:
        """Add the tokens of a batch, and make the steps whose outcomes they decide. Raises ValueError as `draft`."""
        ids = progress.sequence_ids.tolist()
        self.running.rows_of(ids)
        progress.check(dict.fromkeys(ids, 0))
        self.running.record_use()
        self._advance(progress)
        return DraftBatch.empty(len(ids))

    def publish(self) -> None:
        """Do nothing: each step was published when it was committed."""

    def finish(self, sequence_id: int, tokens: np.ndarray, *, learn: bool = True, **_: object) -> None:
        """See `CorpusDrafter.finish`."""
        if len(tokens):
            limit = self._withheld[sequence_id].max_draft
            self._advance(Progress.of_one(sequence_id, tokens, max_draft=limit))
        rest = self._withheld.pop(sequence_id, Withheld()).tokens
        verified = self._offered(sequence_id) if len(rest) else 0
        super().finish(sequence_id, rest, verified=verified, learn=learn)

    def waiting_of(self, sequence_id: int) -> int:
        """Return the number of tokens of a sequence that no step has committed yet."""
        return len(self._withheld[sequence_id].tokens)

    def _advance(self, batch: Progress) -> None:
        """Add the tokens of a batch, and make the steps whose outcomes they decide."""
        ids, bounds = batch.sequence_ids.tolist(), batch.offsets.tolist()
        for index, (sequence_id, limit) in enumerate(zip(ids, batch.max_draft.tolist(), strict=True)):
            sequence = self._withheld[sequence_id]
            sequence.tokens = np.concatenate([sequence.tokens, batch.tokens[bounds[index] : bounds[index + 1]]])
            sequence.max_draft = limit
        while decided := {each: step for each in ids if (step := self._next_step(each)) is not None}:
            self._commit(decided, batch)
            ids = list(decided)

    def _next_step(self, sequence_id: int) -> tuple[int, int] | None:
        """Return how many tokens a sequence commits next, none before its first draft; None if that is not decided yet.

        The second number is that of the steps that a target needs for them; the draft is verified in the first.
        """
        sequence = self._withheld[sequence_id]
        size = len(sequence.tokens)
        if not size:
            return None if sequence.has_draft else (0, 1)
        offered = self._offered(sequence_id)
        accepted = self.running.accepted(sequence_id, sequence.tokens[: offered + 1], offered)
        if size > MAX_WAITING:
            return size, size - accepted
        return (accepted + 1, 1) if accepted < size else None

    def _commit(self, decided: dict[int, tuple[int, int]], batch: Progress) -> None:
        """Commit a step of each sequence, and draft for the next one; batch: where their tokens came from."""
        ids, (sizes, steps) = list(decided), zip(*decided.values(), strict=True)
        sequences = [self._withheld[sequence_id] for sequence_id in ids]
        progress = Progress(
            sequence_ids=np.array(ids, np.uint64),
            tokens=np.concatenate([each.tokens[:size] for each, size in zip(sequences, sizes, strict=True)]),
            offsets=offsets_of(np.array(sizes, np.uint32)),
            verified=self.running.offered_to(ids).astype(np.uint32),
            max_draft=np.array([each.max_draft for each in sequences], np.uint32),
            cost=batch.cost,
            steps=np.array(steps, np.uint32),
            other_tokens=batch.other_tokens,
            other_sequences=batch.other_sequences,
            min_path_prob=batch.min_path_prob,
        )
        super().draft_unpublished(progress)
        super().publish()
        for each, size in zip(sequences, sizes, strict=True):
            each.tokens, each.has_draft = each.tokens[size:], True

    def _offered(self, sequence_id: int) -> int:
        return int(self.running.offered_to([sequence_id])[0])
