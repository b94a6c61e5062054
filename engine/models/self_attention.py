"""Attention of a decoder layer with a key and a value for each group of heads, and the norms of a decoder."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.ops import Ops, Rotation


class Attend(Protocol):
    """Attention of one layer over a context that the caller manages."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [N, heads, head_dim], key and value [N, kv_heads, head_dim] -> [N, heads, head_dim]."""
        ...


class RMSNorm(nn.Module):
    """Root-mean-square normalization with a learned scale (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def normalize_sum(self, residual: Tensor, change: Tensor | None, ops: Ops) -> tuple[Tensor, Tensor]:
        """Return residual + change, and that sum normalized, [N, size] each."""
        return ops.add_norm(residual, change, self.weight, self.eps)


class QKNorm(nn.Module):
    """Normalizes each query and key head separately (Henry et al., 2020), with learned scales for queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.query = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.key = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.heads = config.num_heads

    def forward(self, heads: Tensor, ops: Ops) -> Tensor:
        """Normalize query heads, then key heads, [N, heads + kv_heads, head_dim]."""
        return ops.norm_heads(heads, self.query.weight, self.key.weight, self.heads, self.query.eps)


class SelfAttention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions.

    The query, key and value projections are one matrix.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.qk_norm = QKNorm(config) if config.qk_norm else None
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=config.output_bias)

    def forward(self, layer: int, hidden: Tensor, ops: Ops, rotate: Rotation, attend: Attend) -> Tensor:
        """Map hidden states [N, hidden size] to [N, hidden_size]. layer: index that `attend` gets."""
        heads = self.qkv_proj(hidden).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        # Query and key heads are adjacent, so they are rotated together.
        rotated = heads[:, : self.heads + self.kv_heads]
        if self.qk_norm is not None:
            rotated = self.qk_norm(rotated, ops)
        query, key = rotate(rotated).split((self.heads, self.kv_heads), dim=1)
        value = heads[:, self.heads + self.kv_heads :]
        output: Tensor = self.o_proj(attend(layer, query, key, value).flatten(1))
        return output
