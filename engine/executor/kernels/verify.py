"""Verification on the device: drafts held against the target's tokens, and the state brought up to date.

Nothing here waits for the device or tells the host anything; what was produced comes back as tensors. On a GPU one
kernel does it, with a program for each sequence; elsewhere PyTorch's operations do.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from engine.executor.device_state import DeviceState
from engine.executor.kernels import verify_torch
from engine.executor.kernels.drafted import Drafted, Verified
from engine.executor.optional import has_triton


def verify(state: DeviceState, drafted: Drafted, chosen: Tensor, width: int) -> Verified:
    """Keep what the target would have produced itself, see `engine.speculation.verify`, and commit it.

    chosen: int64 [R], the target's token behind each row. width: rows of a sequence at most (W).
    """
    return _on(chosen).verify(state, drafted, chosen, width)


def _on(tensor: Tensor) -> ModuleType:
    """The implementation for where the tensor is."""
    if tensor.is_cuda and has_triton():
        from engine.executor.kernels import verify_triton

        return verify_triton
    return verify_torch
