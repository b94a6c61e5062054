"""Tokens drawn by settings that the device has; nothing here waits for it.

On a GPU one kernel reads the logits once and keeps nothing of their size; elsewhere PyTorch's operations do it, some
rows at a time. Both loops draw here on a GPU, so that they give the same tokens.
"""

from __future__ import annotations

from torch import Tensor

from engine.executor.optional import has_triton
from engine.sampling import noise as sampling
from engine.sampling.truncation import Limits


def draw_tokens(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, limits: Limits | None = None
) -> Tensor:
    """The target's token for each row of logits, int64 [M]: greedy, or with noise keyed by seed and position.

    logits: float32 [M, V]. temperatures: float64 [M]. seeds, positions: int64 [M], of the token to be chosen.
    """
    if logits.is_cuda and has_triton():
        from engine.executor.kernels import draw_triton

        return draw_triton.draw_tokens(logits, temperatures, seeds, positions, limits)
    return sampling.sample_tokens_on_device(logits, temperatures, seeds, positions, limits)
