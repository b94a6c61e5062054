"""The inputs of a step, made on the device at a fixed number of rows: what a CUDA graph needs, and the host need not
know. On a GPU one kernel makes them for paths, with a program for each sequence; else PyTorch's operations do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.device import inputs_torch
from engine.device.drafted import Drafts, StepInputs, Verified
from engine.device.state import DeviceState
from engine.optional import has_triton


def build_inputs(
    state: DeviceState, seats: Tensor, scheduled: Tensor, drafts: Drafts, starts: Tensor, rows: int, page_size: int
) -> StepInputs:
    """The inputs of a step of `rows` (N) rows.

    seats: int64 [B]. scheduled: int32 [B], committed tokens to run, at least 1. starts: as in `StepInputs`, with room
    for those and the draft behind them. A sequence that does not run all of its committed tokens ignores its draft.
    """
    if seats.is_cuda and drafts.parents is None and has_triton():
        from engine.device import inputs_triton

        return inputs_triton.build_inputs(state, seats, scheduled, drafts, starts, rows, page_size)
    return inputs_torch.build_inputs(state, seats, scheduled, drafts, starts, rows, page_size)


def compaction(state: DeviceState, inputs: StepInputs, verified: Verified, page_size: int) -> tuple[Tensor, Tensor]:
    """Slots to copy keys and values from and to, int64 [B * K] each, so that accepted paths of trees lie together.

    Read all sources before any target is written. What stays where it is, is copied within the scratch page.
    """
    column = torch.arange(verified.rows.shape[1], device=inputs.slots.device)
    rows = inputs.drafted.starts[:, None] + column
    slots = inputs.slots[rows.clamp(max=len(inputs.slots) - 1)]
    moves = (column < verified.counts[:, None]) & (verified.rows != column)
    scratch = state.scratch_page * page_size
    sources = torch.where(moves, slots.gather(1, verified.rows.long()), scratch)
    return sources[:, 1:].flatten(), torch.where(moves, slots, scratch)[:, 1:].flatten()
