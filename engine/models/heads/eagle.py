"""EAGLE-1 and EAGLE-2 heads: a decoder layer over the pair (embedding, the target's last state).

Li et al., "EAGLE" (2024) and "EAGLE-2" (2024). Both versions have the same network; the second drafts dynamic trees.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.decoder import Layer
from engine.models.heads.head import DraftHead, HeadOutput, NoNorm, normalize
from engine.models.ops import PLAIN, Ops
from engine.models.self_attention import Attend


class EagleHead(DraftHead):
    """`layer(fc([embedding, state]))` without norms at the ends, then the target's output projection."""

    def __init__(self, config: ModelConfig, target_layers: int, *, has_bias: bool = True) -> None:
        """target_layers: number of layers of the target. has_bias: whether `fc` has a bias."""
        super().__init__(config)
        self.hidden_layers = (target_layers,)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=has_bias)
        self.layer = Layer(config, 0)
        self.layer.set_submodule("input_norm", NoNorm())

    def target_states(self, hidden: Tensor) -> Tensor:
        """See `DraftHead.target_states`."""
        return normalize(self.target.norm, hidden[:, 0])

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend, ops: Ops = PLAIN
    ) -> HeadOutput:
        """See `DraftHead.forward`."""
        pairs = self.fc(torch.cat((self.embed(tokens), states), dim=-1))
        residual, change = self.layer(pairs, None, ops, self.rotation(positions, ops, pairs), attend)
        state = residual + change
        return HeadOutput(state, state)
