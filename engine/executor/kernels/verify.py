"""Verify draft paths on the device and update its state.

A draft token is accepted if it equals the target's token for the previous row and all earlier draft tokens are
accepted; see `engine.speculation.verify`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.executor.device_state import DeviceState, StepInputs, Verified
from engine.executor.kernels.dispatch import Operation, kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl


def _verify_reference(
    state: DeviceState, request_slots: Tensor, inputs: StepInputs, target_tokens: Tensor, width: int
) -> Verified:
    """Commit the accepted draft tokens of each sequence and the target's own token after them.

    request_slots: int64 [B]; no slot appears twice except the idle one. target_tokens: int64 [N], the target's token
    after each row of the step. width: largest number of rows of one sequence (W).
    """
    column = torch.arange(width, device=target_tokens.device)
    row = (inputs.starts[:-1, None] + column).clamp(max=len(inputs.tokens) - 1).long()
    exists = column < inputs.counts[:, None]
    tokens, own = inputs.tokens[row], target_tokens[row]
    is_kept = pad(tokens[:, 1:] == own[:, :-1], (1, 0), value=True) & exists
    counts = is_kept.cumprod(dim=1).sum(dim=1)
    is_written = column < counts[:, None]
    produced = torch.where(is_written, own, 0).int()
    lengths = state.lengths[request_slots]
    # Unused columns are written to the idle slot.
    written_slots = torch.where(is_written, request_slots[:, None], state.idle)
    state.history[written_slots, torch.where(is_written, lengths[:, None] + column, 0)] = produced
    last = produced.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
    state.last_tokens[request_slots] = torch.where(counts > 0, last, state.last_tokens[request_slots])
    state.lengths[request_slots] = lengths + counts.int()
    return Verified(produced, counts.int())


def _verify_kernel(
    state: DeviceState, request_slots: Tensor, inputs: StepInputs, target_tokens: Tensor, width: int
) -> Verified:
    """Run one program for each sequence."""
    batch, device = len(request_slots), target_tokens.device
    produced = torch.empty(batch, width, dtype=torch.int32, device=device)
    counts = torch.empty(batch, dtype=torch.int32, device=device)
    _verify[(batch,)](
        target_tokens, inputs.tokens, inputs.starts, inputs.counts, request_slots,
        state.lengths, state.last_tokens, state.history, state.history.stride(0),
        produced, counts, width, next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return Verified(produced, counts)


@kernel()
def _verify(
    target_tokens, tokens, starts, counts, request_slots,
    lengths, last_tokens, history, history_stride, out_tokens, out_counts, width, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    row = tl.arange(0, BLOCK)
    is_draft = (row > 0) & (row < count)
    token = tl.load(tokens + start + row, mask=is_draft, other=-1)
    is_right = token == tl.load(target_tokens + start + row - 1, mask=is_draft, other=-2)
    first_wrong = tl.min(tl.where(is_right | (row == 0), BLOCK, row), axis=0)
    produced = tl.minimum(first_wrong, count)
    own = tl.load(target_tokens + start + row, mask=row < produced, other=0).to(tl.int32)
    slot = tl.load(request_slots + sequence)
    length = tl.load(lengths + slot)
    # All threads must have read the length before one of them writes it.
    tl.debug_barrier()
    tl.store(out_tokens + sequence * width + row, own, mask=row < width)
    tl.store(out_counts + sequence, produced)
    tl.store(history + slot * history_stride + length + row, own, mask=row < produced)
    if produced > 0:
        tl.store(last_tokens + slot, tl.load(target_tokens + start + produced - 1).to(tl.int32))
        tl.store(lengths + slot, length + produced)


verify = Operation(_verify_reference, _verify_kernel)
