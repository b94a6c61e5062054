"""Llama-like decoder over a flat batch of tokens.

The model gets tokens, their positions, and a callable that computes attention. It is independent of sequences, pages
and batches, so that training, plain inference and paged inference run the same code. The differences between model
families (biases, normalized queries and keys, scaled positions) are in its config.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.experts import MixtureOfExperts
from engine.models.latent_attention import LatentAttention
from engine.models.layers import PLAIN, Attend, FeedForward, Ops, RMSNorm, Rotation, SelfAttention


class Decoder(nn.Module):
    """Maps token ids and positions to hidden states; `logits` projects them to the vocabulary.

    The query, key and value projections are one matrix, gate and up another, because fewer, larger products are faster
    for steps of few tokens.
    """

    frequencies: Tensor
    """Frequencies of rope for both halves of a head, float32 [head_dim] for weights of any dtype."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()
        with torch.device("cpu"):  # operators on the meta device import torch._dynamo, which takes seconds
            frequencies = config.rope.frequencies(config.head_dim).repeat(2)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, ops: Ops = PLAIN) -> Tensor:
        """tokens [N] int64, positions [N] int64 -> hidden states [N, hidden_size], normalized."""
        return self.hidden_states(tokens, positions, attend, ops)[0]

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, ops: Ops = PLAIN, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Run the model like `forward`, and also return the hidden states after some layers.

        layers: L numbers from 0, the embeddings, to num_layers, the last layer's output before the final norm.
        Returns the normalized states [N, hidden_size] and those of `layers`, in their order, [N, L, hidden_size].
        Raises ValueError for a layer that the model does not have.
        """
        if not all(0 <= layer <= len(self.layers) for layer in layers):
            raise ValueError(f"hidden states exist after layers 0 to {len(self.layers)}, not after {list(layers)}")
        residual, change = self.embedding(tokens), None
        cos, sin = self.config.rope.turns(positions, self.frequencies)
        rotate = ops.rotation(cos, sin, residual.dtype)
        states = residual.new_empty(len(residual), len(layers), residual.shape[1])
        _store(states, layers, 0, residual, change)
        for done, layer in enumerate(self.layers, 1):
            residual, change = layer(residual, change, ops, rotate, attend)
            _store(states, layers, done, residual, change)
        return self.norm.normalize_sum(residual, change, ops)[1], states

    def tie(self) -> None:
        """Share the embedding's weight with the output projection, if the model does."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [M, hidden_size] -> logits [M, vocab_size]."""
        return self.lm_head(hidden)


def _store(states: Tensor, layers: Sequence[int], layer: int, residual: Tensor, change: Tensor | None) -> None:
    """Copy residual + change to the rows of `states` for `layer`; later operations may overwrite both inputs."""
    for index, wanted in enumerate(layers):
        if wanted == layer:
            states[:, index] = residual if change is None else residual + change


class Layer(nn.Module):
    """Pre-norm attention, then a pre-norm feed-forward network or mixture of experts."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = SelfAttention(config) if config.latent is None else LatentAttention(config, config.latent)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward: FeedForward | MixtureOfExperts
        if config.experts is not None and index in config.experts.layers:
            self.feed_forward = MixtureOfExperts(config.hidden_size, config.experts)
        else:
            self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(
        self, residual: Tensor, change: Tensor | None, ops: Ops, rotate: Rotation, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Map hidden states to hidden states, each given as residual + change, [N, hidden_size] each.

        They are separate so that the addition can be fused with the following norm.
        """
        residual, hidden = self.input_norm.normalize_sum(residual, change, ops)
        change = self.attention(self.index, hidden, ops, rotate, attend)
        residual, hidden = self.mlp_norm.normalize_sum(residual, change, ops)
        return residual, self.feed_forward(hidden, ops)
