"""What an attention backend is: it owns the KV cache and attends for one step's batch."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from engine.attention.fixed import FixedAttention, StepShape
from engine.executor.batch import Batch
from engine.models.decoder import Attend


class Attention(ABC):
    """Attention over paged keys and values."""

    @abstractmethod
    def begin(self, batch: Batch) -> Attend:
        """Attention for one step: a callable that stores a layer's new keys and values and attends to all of them.

        Each token attends to its sequence's tokens up to itself; in a draft tree, to the committed tokens, its
        ancestors and itself. What earlier steps stored behind a sequence's `computed` tokens (rejected drafts) is
        overwritten, never read.
        """

    @abstractmethod
    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy the keys and values of all layers between slots, int64 [n] each; all are read before one is written."""

    @abstractmethod
    def fixed(self, step: StepShape) -> FixedAttention:
        """Attention over the same cache for steps of one shape. The cache's last page must be nobody's."""
