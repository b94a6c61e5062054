"""The small operations of a decoder as FlashInfer's fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.executor.optional import flashinfer
from engine.models.ops import Ops, Rotation


class FusedOps(Ops):
    """Runs each operation as one kernel that computes in float32. For inference only: inputs may be overwritten."""

    def __init__(self) -> None:
        """Raise UserError if FlashInfer cannot be imported."""
        self._flashinfer = flashinfer()

    def add_norm(self, residual: Tensor, change: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Ops.add_norm`."""
        if change is None:
            return residual, self._flashinfer.rmsnorm(residual, weight, eps)
        self._flashinfer.fused_add_rmsnorm(change, residual, weight, eps)
        return residual, change

    def norm_heads(self, heads: Tensor, query_weight: Tensor, key_weight: Tensor, count: int, eps: float) -> Tensor:
        """See `Ops.norm_heads`."""
        for part, weight in ((heads[:, :count], query_weight), (heads[:, count:], key_weight)):
            self._flashinfer.rmsnorm(part, weight, eps, out=part)
        return heads

    def rotation(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Rotation:  # noqa: ARG002  # any dtype
        """See `Ops.rotation`."""
        # The kernel looks up angles in a table by position. This table has one row for each token of the step.
        half = cos.shape[-1] // 2
        table = torch.cat((cos[:, 0, :half], sin[:, 0, :half]), dim=-1)
        rows = torch.arange(len(table), device=table.device)

        def rotate(heads: Tensor) -> Tensor:
            # The kernel takes two tensors of heads and treats them alike.
            first, last = heads[:, :-1], heads[:, -1:]
            self._flashinfer.apply_rope_with_cos_sin_cache_inplace(rows, first, last, heads.shape[-1], table)
            return heads

        return rotate

    def gate(self, gate_up: Tensor) -> Tensor:
        """See `Ops.gate`."""
        gated: Tensor = self._flashinfer.silu_and_mul(gate_up)
        return gated
