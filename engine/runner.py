"""The forward pass of one batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import Attention
from engine.batch import Batch
from engine.models.decoder import Decoder
from engine.models.ops import PLAIN, Ops


class Runner:
    """A model and the attention over its cache."""

    def __init__(self, model: Decoder, attention: Attention, device: str = "cpu", ops: Ops = PLAIN) -> None:
        self._model = model
        self._attention = attention
        self._device = device
        self._ops = ops

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Logits of the batch's `logit_rows`, float32 [M, vocab_size]."""
        tokens, positions, rows = (
            torch.from_numpy(array).to(self._device) for array in (batch.tokens, batch.positions, batch.logit_rows)
        )
        hidden = self._model(tokens, positions, self._attention.begin(batch), self._ops)
        return self._model.logits(hidden[rows]).float()

    @torch.inference_mode()
    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy keys and values between slots of the cache, see `Attention.move`."""
        self._attention.move(sources, targets)
