"""Medusa heads: the head of index i predicts the token i + 2 places after the target's last position.

Cai et al., "Medusa" (2024), version 1: residual blocks and an output projection per head, on the target's last state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.heads.head import normalize


class ResidualBlock(nn.Module):
    """x + SiLU(linear(x))."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states, [N, size] each."""
        return hidden + F.silu(self.linear(hidden))


class MedusaHeads(nn.Module):
    """Predicts several next tokens independently of each other, without attention."""

    def __init__(self, config: ModelConfig, count: int, blocks: int = 1) -> None:
        """config: the target's shape. count: number of heads. blocks: residual blocks per head."""
        super().__init__()
        self.config = config
        self.hidden_layers = (config.num_layers,)
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(config.hidden_size) for _ in range(blocks)),
                nn.Linear(config.hidden_size, config.vocab_size, bias=False),
            )
            for _ in range(count)
        )
        self._attached: tuple[Decoder, ...] = ()

    def attach(self, target: Decoder) -> None:
        """Use the target's final norm."""
        self._attached = (target,)

    def target_states(self, hidden: Tensor) -> Tensor:
        """Return the normalized last states, [N, hidden_size]; hidden: [N, 1, hidden_size]."""
        return normalize(self._attached[0].norm, hidden[:, 0])

    def forward(self, states: Tensor) -> Tensor:
        """Return logits [N, count, vocab_size] for states [N, hidden_size]."""
        return torch.stack([head(states) for head in self.heads], dim=1)
