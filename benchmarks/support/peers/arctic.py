"""The suffix trees of Snowflake's ArcticInference, from its package."""

from __future__ import annotations

import numpy as np

from drafter_service.commands.advise.arctic import ArcticDrafter


class Arctic(ArcticDrafter):
    """The drafter, and the memory that it takes."""

    _remembered = 0

    def commit(self, sequence_id: int, tokens: np.ndarray) -> None:
        """Add tokens to the sequence's tree and to the shared one."""
        super().commit(sequence_id, tokens)
        self._remembered += len(tokens)

    def forget(self, sequence_id: int) -> None:
        """Remove a sequence's text from the shared tree."""
        self._cache.evict_cached_response(sequence_id)

    def bytes_per_token(self) -> float:
        """Return the memory of the shared tree per token, by its own internal estimate."""
        return self._cache._global_tree.estimate_memory() / max(1, self._remembered)
