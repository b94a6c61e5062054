"""Gated feed-forward network (Shazeer, "GLU Variants Improve Transformer", 2020)."""

from __future__ import annotations

from torch import Tensor, nn

from engine.models.ops import Ops


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
