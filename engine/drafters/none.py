"""No drafts: plain decoding."""

from __future__ import annotations

import numpy as np

from ssd.types import DraftBatch, Progress


class NoDrafter:
    """Answers every step without a draft."""

    def start(self, sequence_id: int, prompt: np.ndarray) -> None:
        """Nothing to note."""

    def draft(self, progress: Progress) -> DraftBatch:
        """No draft for any sequence."""
        return DraftBatch.empty(len(progress.sequence_ids))

    def finish(
        self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, accepted: int = 0, learn: bool = True
    ) -> None:
        """Nothing to note."""

    def close(self) -> None:
        """Nothing to release."""
