"""The small operations between a decoder's matrix products: their interface, and the reference in plain PyTorch.

A decoder computes everything except matrix products and attention through one `Ops` object, so that a backend can
replace all of these operations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

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
