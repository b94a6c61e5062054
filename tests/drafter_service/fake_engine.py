"""An engine that verifies drafts against texts that are known beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from drafter_service.client.core import Core

from ssd.types import DraftBatch, Progress, offsets_of


@dataclass
class Request:
    """A running request."""

    text: list[int]
    """Prompt and output, all that there will be."""
    done: int
    """How many tokens of it there are by now."""
    committed: int = 0
    """How many of these came since the last draft."""
    verified: int = 0
    accepted: int = 0

    @property
    def news(self) -> list[int]:
        return self.text[self.done - self.committed : self.done]


@dataclass
class FakeEngine:
    """Runs requests by a client, of which it needs no more than the messages' meaning."""

    running: dict[int, Request] = field(default_factory=dict)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def progress(self, sequence_ids: list[int], limits: list[int], cost: float | None = None) -> Progress:
        """What the engine tells of its requests."""
        chosen = [self.running[sequence_id] for sequence_id in sequence_ids]
        return Progress(
            np.array(sequence_ids, np.uint64),
            np.array([token for request in chosen for token in request.news], np.uint32),
            offsets_of(np.array([request.committed for request in chosen], np.int64)),
            np.array([request.verified for request in chosen], np.uint32),
            np.array([request.accepted for request in chosen], np.uint32),
            np.array(limits, np.uint32),
            cost,
        )

    def limit(self, sequence_id: int, limit: int) -> int:
        """How many tokens it can use: the target adds one of its own."""
        request = self.running[sequence_id]
        return max(0, min(limit, len(request.text) - request.done - 1))

    def verify(self, sequence_ids: list[int], drafts: DraftBatch, verified: list[int] | None = None) -> None:
        """Verify drafts, or the first few tokens of each, and commit what the target produces."""
        for index, sequence_id in enumerate(sequence_ids):
            request = self.running[sequence_id]
            draft = drafts.tokens_of(index).tolist()
            if verified is not None:
                draft = draft[: verified[index]]
            own = request.text[request.done :]
            accepted = 0
            while accepted < len(draft) and draft[accepted] == own[accepted]:
                accepted += 1
            request.verified, request.accepted = len(draft), accepted
            request.committed = len(own[: accepted + 1])
            request.done += request.committed
            self.steps += request.committed > 0
            self.drafted += len(draft)
            self.accepted += accepted

    def finish(self, core: Core, sequence_id: int, learn: bool = True) -> list[int]:
        """End a request; returns its text."""
        request = self.running.pop(sequence_id)
        core.finish(
            sequence_id,
            np.array(request.news, np.uint32),
            verified=request.verified,
            accepted=request.accepted,
            learn=learn,
        )
        return request.text[: request.done]
