"""No drafts: plain decoding."""

from __future__ import annotations

from ssd.types import DraftBatch, Drafter, DraftLimits, Progress


class NoDrafter(Drafter):
    """Proposes nothing."""

    limits = DraftLimits(depth=0)

    def draft(self, progress: Progress) -> DraftBatch:
        """Return no draft for any sequence."""
        return DraftBatch.empty(len(progress.sequence_ids))
