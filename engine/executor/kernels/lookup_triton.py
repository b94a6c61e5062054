"""Prompt lookup as a Triton kernel, one program a sequence; see `engine.executor.kernels.lookup`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.executor.device_state import DeviceState
from engine.executor.kernels.lookup_torch import LONGEST
from engine.executor.kernels.tensors import Drafts

BLOCK = 2048
"""Places that a program looks at at a time."""


def completed(state: DeviceState, seats: Tensor, drafts: Drafts, spare: Tensor) -> tuple[Drafts, Tensor]:
    """See `engine.executor.kernels.lookup.completed`. Writes to the drafts; reads texts only where those are empty."""
    width = drafts.tokens.shape[1]
    found = torch.empty(len(seats), dtype=torch.int32, device=seats.device)
    _look_up[(len(seats),)](
        seats, state.lengths, state.history, state.history.stride(0), spare, spare.stride(0),
        drafts.tokens, drafts.lengths, found, width,
        LONGEST, BLOCK, triton.next_power_of_2(max(1, width)), num_warps=8,
    )  # fmt: skip
    return drafts, found


@triton.jit
def _look_up(
    seats, lengths, history, history_stride, spare, spare_stride, out_tokens, out_counts, out_found, width,
    LONGEST: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    seat = tl.load(seats + sequence)
    room = tl.minimum(tl.load(spare + sequence * spare_stride), width)
    is_found = tl.zeros([], tl.int32)
    if (tl.load(out_counts + sequence) == 0) & (room > 0):
        length = tl.load(lengths + seat)
        text = history + seat * history_stride
        # Match length and place in one number, of which the largest is wanted.
        best = tl.zeros([], tl.int64)
        for first in range(1, length, BLOCK):
            place = first + tl.arange(0, BLOCK)
            agrees = place < length
            match = tl.zeros([BLOCK], tl.int64)
            for back in tl.static_range(1, LONGEST + 1):
                agrees = agrees & (place >= back)
                last = tl.load(text + length - back, mask=length >= back, other=0)
                agrees = agrees & (tl.load(text + place - back, mask=agrees, other=0) == last)
                match += agrees.to(tl.int64)
            best = tl.maximum(best, tl.max(tl.where(match > 0, (match << 32) + place, 0), axis=0))
        match = best >> 32
        place = best & 0xFFFFFFFF
        count = tl.minimum(tl.where(match > 0, tl.full([], 1, tl.int64) << match, 0), room)
        column = tl.arange(0, WIDTH)
        token = tl.load(text + place + column % tl.maximum(length - place, 1), mask=column < count, other=0)
        tl.store(out_tokens + sequence * width + column, token, mask=column < width)
        tl.store(out_counts + sequence, count.to(tl.int32))
        is_found = (count > 0).to(tl.int32)
    tl.store(out_found + sequence, is_found)
