"""Parts of a decoder layer: norms, attention with grouped heads, and the gated feed-forward network.

Everything except matrix products and attention is computed by one `Ops` object, so that a backend can replace all of
these operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.rope import rotate

Rotation = Callable[[Tensor], Tensor]
"""Rotates heads [N, H, head_dim] by the positions of their tokens, possibly in place."""


class Ops:
    """Plain PyTorch: the reference on every device."""

    def add_norm(self, residual: Tensor, change: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the sum, and the sum normalized by its root mean square; all [N, size]. May overwrite both inputs."""
        total = residual if change is None else residual + change
        return total, F.rms_norm(total, weight.shape, weight, eps)

    def norm_heads(self, heads: Tensor, query_weight: Tensor, key_weight: Tensor, count: int, eps: float) -> Tensor:
        """Normalize each head separately, [N, H, head_dim], the first `count` with `query_weight`. May be in place."""
        query, key = heads[:, :count], heads[:, count:]
        return torch.cat(
            (
                F.rms_norm(query, query_weight.shape, query_weight, eps),
                F.rms_norm(key, key_weight.shape, key_weight, eps),
            ),
            dim=1,
        )

    def rotation(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation of heads of a dtype. cos, sin: float32 [N, 1, head_dim], from `Rope.turns`."""
        cos, sin = cos.to(dtype), sin.to(dtype)
        return lambda heads: rotate(heads, cos, sin)

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, [N, 2 * size] -> [N, size]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


PLAIN = Ops()
"""The shared instance; it has no state."""


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


class FeedForward(nn.Module):
    """`down_proj(silu(gate) * up)`, with gate and up in one matrix."""

    def __init__(self, hidden_size: int, size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * size, bias=bias)
        self.down_proj = nn.Linear(size, hidden_size, bias=bias)

    def forward(self, hidden: Tensor, ops: Ops) -> Tensor:
        """Map hidden states [N, hidden_size] to [N, hidden_size]."""
        output: Tensor = self.down_proj(ops.gate(self.gate_up_proj(hidden)))
        return output
