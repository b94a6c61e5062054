"""EAGLE-3 heads: one decoder layer over the embedding and a fusion of three of the target's hidden states.

Li et al., "EAGLE-3" (2025). The output projection may cover a reduced draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.decoder import Layer
from engine.models.heads.head import DraftHead, HeadOutput, normalize
from engine.models.ops import PLAIN, Ops, Rotation
from engine.models.self_attention import Attend, RMSNorm, SelfAttention


@dataclass(frozen=True)
class Eagle3Style:
    """Options of published checkpoints, named as in their configurations."""

    norm_before_residual: bool = False
    """Whether the residual stream begins with the normalized state."""
    norm_before_fc: bool = False
    """Whether the concatenated states of the target are normalized together."""
    fc_norm: bool = False
    """Whether each of the target's states is normalized."""
    norm_output: bool = False
    """Whether the state for the next draft position has passed the final norm."""


class Eagle3Layer(Layer):
    """A decoder layer whose attention reads the embedding beside the hidden state."""

    def __init__(self, config: ModelConfig, style: Eagle3Style) -> None:
        super().__init__(config, 0)
        assert isinstance(self.attention, SelfAttention)
        rows = self.attention.qkv_proj.out_features
        self.attention.qkv_proj = nn.Linear(2 * config.hidden_size, rows, bias=config.qkv_bias)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._style = style

    def run(
        self, embeddings: Tensor, states: Tensor, ops: Ops, rotate: Rotation, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Map embeddings and states to hidden states, given as residual + change, [N, hidden_size] each."""
        normalized = normalize(self.hidden_norm, states, ops)
        residual = normalized if self._style.norm_before_residual else states
        pairs = torch.cat((normalize(self.input_norm, embeddings, ops), normalized), dim=-1)
        change = self.attention(self.index, pairs, ops, rotate, attend)
        residual, hidden = self.mlp_norm.normalize_sum(residual, change, ops)
        return residual, self.feed_forward(hidden, ops)


class Eagle3Head(DraftHead):
    """`layer([embedding, state])`, then a norm and an output projection of its own."""

    def __init__(
        self,
        config: ModelConfig,
        hidden_layers: tuple[int, ...],
        style: Eagle3Style,
        *,
        target_hidden_size: int,
        draft_vocab_size: int,
    ) -> None:
        """config: shape of the layer. hidden_layers: layers of the target that it reads, ascending."""
        super().__init__(config)
        self.style = style
        self.hidden_layers = hidden_layers
        size, eps, count = config.hidden_size, config.rms_norm_eps, len(hidden_layers)
        self.fc = nn.Linear(count * target_hidden_size, size, bias=False)
        self.input_norm = RMSNorm(count * target_hidden_size, eps) if style.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(target_hidden_size, eps) for _ in hidden_layers) if style.fc_norm else None
        self.layer = Eagle3Layer(config, style)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, draft_vocab_size, bias=False)

    def target_states(self, hidden: Tensor) -> Tensor:
        """See `DraftHead.target_states`."""
        if self.fc_norm is not None:
            hidden = torch.stack([normalize(norm, hidden[:, at]) for at, norm in enumerate(self.fc_norm)], dim=1)
        fused = hidden.flatten(1)
        return self.fc(fused if self.input_norm is None else normalize(self.input_norm, fused))

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend, ops: Ops = PLAIN
    ) -> HeadOutput:
        """See `DraftHead.forward`."""
        rotate = self.rotation(positions, ops, states)
        residual, change = self.layer.run(self.embed(tokens), states, ops, rotate, attend)
        state, hidden = self.norm.normalize_sum(residual, change, ops)
        return HeadOutput(hidden, hidden if self.style.norm_output else state)
