"""The inputs of a step, made on the device at a fixed number of rows: what a CUDA graph needs, and the host need not
know. On a GPU one kernel makes them, with a program for each sequence; else PyTorch's operations do.
"""

from __future__ import annotations

from torch import Tensor

from engine.executor.device_state import DeviceState
from engine.executor.kernels import inputs_torch
from engine.executor.kernels.drafted import Drafts, StepInputs
from engine.executor.optional import has_triton


def build_inputs(
    state: DeviceState, seats: Tensor, scheduled: Tensor, drafts: Drafts, starts: Tensor, rows: int, page_size: int
) -> StepInputs:
    """The inputs of a step of `rows` (N) rows.

    seats: int64 [B]. scheduled: int32 [B], committed tokens to run, at least 1. starts: as in `StepInputs`, with room
    for those and the draft behind them. A sequence that does not run all of its committed tokens ignores its draft.
    """
    if seats.is_cuda and has_triton():
        from engine.executor.kernels import inputs_triton

        return inputs_triton.build_inputs(state, seats, scheduled, drafts, starts, rows, page_size)
    return inputs_torch.build_inputs(state, seats, scheduled, drafts, starts, rows, page_size)
