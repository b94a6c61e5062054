"""An engine that verifies drafts against known texts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drafter_service.client.protocol import Protocol
from ssd.types import DraftBatch, Progress, offsets_of


@dataclass
class Request:
    """A running request."""

    text: list[int]
    """Complete prompt and output."""
    done: int
    """Number of its tokens that are prompt or committed."""
    committed: int = 0
    """Number of tokens committed since the last draft."""
    verified: int = 0

    @property
    def unreported(self) -> list[int]:
        return self.text[self.done - self.committed : self.done]


@dataclass
class FakeEngine:
    """Runs requests and reports to a client."""

    running: dict[int, Request] = field(default_factory=dict)
    steps: int = 0
    drafted: int = 0

    def progress(self, sequence_ids: list[int], limits: list[int], cost: float | None = None) -> Progress:
        """Return the progress that the engine reports."""
        chosen = [self.running[sequence_id] for sequence_id in sequence_ids]
        verified = np.array([request.verified for request in chosen], np.uint32)
        return Progress(
            sequence_ids=np.array(sequence_ids, np.uint64),
            tokens=np.array([token for request in chosen for token in request.unreported], np.uint32),
            offsets=offsets_of(np.array([request.committed for request in chosen], np.int64)),
            verified=verified,
            max_draft=np.array(limits, np.uint32),
            cost=cost,
        )

    def limit(self, sequence_id: int, limit: int) -> int:
        """Return the number of draft tokens that a request can use: the target adds a bonus token."""
        request = self.running[sequence_id]
        return max(0, min(limit, len(request.text) - request.done - 1))

    def verify(self, sequence_ids: list[int], drafts: DraftBatch, verified: list[int] | None = None) -> None:
        """Verify drafts, or the first `verified` tokens of each, and commit the target's tokens."""
        for index, sequence_id in enumerate(sequence_ids):
            request = self.running[sequence_id]
            draft = drafts.tokens_of(index).tolist()
            if verified is not None:
                draft = draft[: verified[index]]
            own = request.text[request.done :]
            accepted = 0
            while accepted < len(draft) and draft[accepted] == own[accepted]:
                accepted += 1
            request.verified = len(draft)
            request.committed = len(own[: accepted + 1])
            request.done += request.committed
            self.steps += request.committed > 0
            self.drafted += len(draft)

    def finish(self, client: Protocol, sequence_id: int, learn: bool = True) -> list[int]:
        """End a request; return its text."""
        request = self.running.pop(sequence_id)
        client.finish(
            sequence_id, np.array(request.unreported, np.uint32), verified=request.verified, steps=1, learn=learn
        )
        return request.text[: request.done]
