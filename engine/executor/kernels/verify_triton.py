"""Verification as a Triton kernel, one program a sequence; see `engine.executor.kernels.verify`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.executor.device_state import DeviceState
from engine.executor.kernels.drafted import Drafted, Verified


def verify(state: DeviceState, drafted: Drafted, chosen: Tensor, width: int) -> Verified:
    """See `engine.executor.kernels.verify.verify`."""
    batch, device = len(drafted.seats), drafted.seats.device
    produced = torch.empty(batch, width, dtype=torch.int32, device=device)
    counts = torch.empty(batch, dtype=torch.int32, device=device)
    _verify[(batch,)](
        chosen, *drafted, state.lengths, state.computed, state.last_tokens, state.history, state.history.stride(0),
        produced, counts, width, triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return Verified(produced, counts)


@triton.jit
def _verify(
    chosen, tokens, starts, counts, scheduled, seats,
    lengths, computed, last_tokens, history, history_stride, out_tokens, out_counts, width, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    row = tl.arange(0, BLOCK)
    is_draft = (row > 0) & (row < count)
    token = tl.load(tokens + start + row, mask=is_draft, other=-1)
    is_right = token == tl.load(chosen + start + row - 1, mask=is_draft, other=-2)
    first_wrong = tl.min(tl.where(is_right | (row == 0), BLOCK, row), axis=0)
    produced = tl.minimum(first_wrong, count)
    own = tl.load(chosen + start + row, mask=row < produced, other=0).to(tl.int32)
    seat = tl.load(seats + sequence)
    length = tl.load(lengths + seat)
    # All threads must have read the length before one of them writes it.
    tl.debug_barrier()
    tl.store(out_tokens + sequence * width + row, own, mask=row < width)
    tl.store(out_counts + sequence, produced)
    tl.store(history + seat * history_stride + length + row, own, mask=row < produced)
    if produced > 0:
        tl.store(last_tokens + seat, tl.load(chosen + start + produced - 1).to(tl.int32))
        tl.store(lengths + seat, length + produced)
    accepted = tl.maximum(produced - 1, 0)
    tl.store(computed + seat, tl.load(computed + seat) + tl.load(scheduled + sequence) + accepted)
