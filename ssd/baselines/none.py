"""No drafts: plain decoding."""

from __future__ import annotations

import numpy as np

from ssd.types import DraftBatch, DraftLimits, Progress


class NoDrafter:
    """Proposes nothing; implements `ssd.types.Drafter`."""

    limits = DraftLimits(depth=0)

    def start(self, sequence_id: int, prompt: np.ndarray) -> None:
        """Do nothing."""

    def draft(self, progress: Progress) -> DraftBatch:
        """Return no draft for any sequence."""
        return DraftBatch.empty(len(progress.sequence_ids))

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, learn: bool = True) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
