"""What an attention backend is: it owns the KV cache and attends for one step's batch."""

from __future__ import annotations

from abc import ABC, abstractmethod

from engine.batch import Batch
from engine.models.decoder import Attend


class Attention(ABC):
    """Attention over paged keys and values."""

    @abstractmethod
    def begin(self, batch: Batch) -> Attend:
        """Attention for one step: a callable that stores a layer's new keys and values and attends to all of them.

        Each token attends to its sequence's tokens up to itself. What earlier steps stored behind a sequence's
        `computed` tokens (rejected drafts) is overwritten, never read.
        """
