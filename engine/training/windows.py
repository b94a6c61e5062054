"""Windows of text with the target's hidden states."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.models.decoder import Decoder
from engine.training.attention import WindowAttention

BATCH_TOKENS = 4096
"""Tokens in one forward pass of the target."""


class Windows(NamedTuple):
    """A batch of B windows of T tokens."""

    tokens: Tensor
    """int64 [B, T]."""
    states: Tensor
    """float32 [B, T, L, H]: the target's hidden states after the selected layers."""


def read_windows(target: Decoder, tokens: np.ndarray, layers: tuple[int, ...]) -> Windows:
    """Return windows, uint32 [B, T], with the target's states after `layers`. Each window is run without context."""
    text = torch.from_numpy(tokens.astype(np.int64))
    batches = text.split(max(1, BATCH_TOKENS // text.shape[1]))
    return Windows(text, torch.cat([_states(target, batch, layers) for batch in batches]))


@torch.no_grad()
def _states(target: Decoder, tokens: Tensor, layers: tuple[int, ...]) -> Tensor:
    rows, length = tokens.shape
    attend = WindowAttention(rows, length).attend
    states = target.hidden_states(tokens.flatten(), torch.arange(length).repeat(rows), attend, layers=layers)[1]
    return states.view(rows, length, *states.shape[1:])
