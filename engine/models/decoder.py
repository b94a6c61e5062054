"""Llama-like decoder over a flat batch of tokens.

The model gets tokens, their positions, and a callable that computes attention. It is independent of sequences, pages
and batches, so that training, plain inference and paged inference run the same code. The differences between model
families (biases, normalised queries and keys, scaled positions) are in its config.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.experts import MixtureOfExperts
from engine.models.feed_forward import FeedForward
from engine.models.ops import PLAIN, Ops, Rotation


class Attend(Protocol):
    """Attention of one layer over a context that the caller manages."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [N, heads, head_dim], key and value [N, kv_heads, head_dim] -> [N, heads, head_dim]."""
        ...


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
        """tokens [N] int64, positions [N] int64 -> hidden states [N, hidden_size], normalised."""
        return self.hidden_states(tokens, positions, attend, ops)[0]

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, ops: Ops = PLAIN, layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Run the model like `forward`, and also return the hidden states after some layers.

        layers: L numbers from 0, the embeddings, to num_layers, the last layer's output before the final norm.
        Returns the normalised states [N, hidden_size] and those of `layers`, in their order, [N, L, hidden_size].
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
        return self.norm.normalise_sum(residual, change, ops)[1], states

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
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.qkv_proj = nn.Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.qk_norm = QKNorm(config) if config.qk_norm else None
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=config.output_bias)
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
        residual, hidden = self.input_norm.normalise_sum(residual, change, ops)
        residual, hidden = self.mlp_norm.normalise_sum(residual, self._attention(hidden, ops, rotate, attend), ops)
        return residual, self.feed_forward(hidden, ops)

    def _attention(self, hidden: Tensor, ops: Ops, rotate: Rotation, attend: Attend) -> Tensor:
        heads = self.qkv_proj(hidden).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        # Query and key heads are adjacent, so they are rotated together.
        rotated = heads[:, : self.heads + self.kv_heads]
        if self.qk_norm is not None:
            rotated = self.qk_norm(rotated, ops)
        query, key = rotate(rotated).split((self.heads, self.kv_heads), dim=1)
        value = heads[:, self.heads + self.kv_heads :]
        return self.o_proj(attend(self.index, query, key, value).flatten(1))


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def normalise_sum(self, residual: Tensor, change: Tensor | None, ops: Ops) -> tuple[Tensor, Tensor]:
        """Return residual + change, and that sum normalised, [N, size] each."""
        return ops.add_norm(residual, change, self.weight, self.eps)


class QKNorm(nn.Module):
    """Normalises each query and key head separately (Henry et al., 2020), with learned scales for queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.query = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.key = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.heads = config.num_heads

    def forward(self, heads: Tensor, ops: Ops) -> Tensor:
        """Normalise query heads, then key heads, [N, heads + kv_heads, head_dim]."""
        return ops.norm_heads(heads, self.query.weight, self.key.weight, self.heads, self.query.eps)
