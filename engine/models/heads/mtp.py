"""Multi-token prediction (MTP): one further decoder layer over the target's last hidden state and the next token.

DeepSeek-V3 Technical Report (2024), section 2.2. To draft several tokens with a single layer, it is run again on its
own output. The states that enter it have passed the target's final norm, or, when it is run again, its own: vLLM 0.32,
SGLang 0.5.23 and transformers 5.23 agree on this for all families.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.decoder import Layer
from engine.models.heads.head import DraftHead, HeadOutput, normalize
from engine.models.ops import PLAIN, Ops
from engine.models.self_attention import Attend, RMSNorm


@dataclass(frozen=True)
class MtpStyle:
    """Differences between model families."""

    zeroes_first: bool = True
    """Whether the embedding of the first pair, at position 1, is replaced with zeros, as in DeepSeek-V3 and MiMo."""


class MtpHead(DraftHead):
    """`layer(fc([embedding_norm(embedding), hidden_norm(state)]))`, then a norm and the output projection."""

    def __init__(self, config: ModelConfig, target_layers: int, style: MtpStyle) -> None:
        """target_layers: number of layers of the target."""
        super().__init__(config)
        self.style = style
        self.hidden_layers = (target_layers,)
        self.embedding_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = Layer(config, 0)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def target_states(self, hidden: Tensor) -> Tensor:
        """See `DraftHead.target_states`."""
        return normalize(self.target.norm, hidden[:, 0])

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend, ops: Ops = PLAIN
    ) -> HeadOutput:
        """See `DraftHead.forward`."""
        embeddings = self.embed(tokens)
        if self.style.zeroes_first:
            embeddings = torch.where(positions[:, None] == 1, 0, embeddings)
        embeddings = normalize(self.embedding_norm, embeddings, ops)
        pairs = self.fc(torch.cat((embeddings, normalize(self.hidden_norm, states, ops)), dim=-1))
        residual, change = self.layer(pairs, None, ops, self.rotation(positions, ops, pairs), attend)
        hidden = self.norm.normalize_sum(residual, change, ops)[1]
        return HeadOutput(hidden, hidden)
