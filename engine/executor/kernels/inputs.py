"""Build the inputs of a step on the device, with a fixed number of rows, as CUDA graphs require.

Each sequence runs its last committed token and a draft. The host need not know the sequences' lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.executor.device_state import DeviceState, PaddedDrafts, StepInputs
from engine.executor.kernels.dispatch import Operation, kernel

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 32
"""Number of rows that a program of the kernel builds at a time."""


def _build_reference(
    state: DeviceState, request_slots: Tensor, drafts: PaddedDrafts, starts: Tensor, rows: int, page_size: int
) -> StepInputs:
    """Return the inputs of a step of `rows` (N) rows.

    request_slots: int64 [B]. starts: int32 [B + 1], as in `StepInputs`, with room for each sequence's last token and
    draft.
    """
    size = drafts.tokens.shape[1]
    lengths = state.lengths[request_slots]
    room = state.limits[request_slots] - lengths
    # The target adds a bonus token after the draft.
    counts = torch.where(room > 0, 1 + torch.minimum(drafts.lengths, room - 1), 0)
    contexts = (lengths - 1).clamp(min=0)
    row = torch.arange(rows, device=request_slots.device, dtype=torch.int32)
    # Rows after the last sequence belong to the idle slot.
    owner = torch.searchsorted(starts[1:], row, right=True)
    slot = pad(request_slots, (0, 1), value=state.idle)[owner]
    within = row - starts[owner]
    is_token = within < pad(counts, (0, 1))[owner]
    positions = torch.where(is_token, pad(contexts, (0, 1))[owner] + within, 0)
    tokens = state.last_tokens[slot]
    if size:
        draft_tokens = drafts.tokens[owner.clamp(max=len(request_slots) - 1), (within - 1).clamp(0, size - 1)]
        tokens = torch.where(within == 0, tokens, draft_tokens)
    pages = state.page_tables[slot, (positions // page_size).clamp(max=state.page_tables.shape[1] - 1)]
    cache_slots = torch.where(is_token, pages * page_size + positions % page_size, state.scratch_page * page_size)
    return StepInputs(
        tokens=torch.where(is_token, tokens, 0).long(),
        positions=positions.long(),
        cache_slots=cache_slots.long(),
        request_slots=slot,
        starts=starts,
        contexts=contexts,
        counts=counts.int(),
    )


def _build_kernel(
    state: DeviceState, request_slots: Tensor, drafts: PaddedDrafts, starts: Tensor, rows: int, page_size: int
) -> StepInputs:
    """Run one program for each sequence, and one for the rows after the last."""
    batch, device = len(request_slots), request_slots.device
    tokens, positions, cache_slots, row_slots = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(4))
    contexts, counts = (torch.empty(batch, dtype=torch.int32, device=device) for _ in range(2))
    _build[(batch + 1,)](
        request_slots, drafts.tokens, drafts.tokens.stride(0), drafts.lengths, starts,
        state.lengths, state.limits, state.last_tokens, state.page_tables, state.page_tables.stride(0),
        tokens, positions, cache_slots, row_slots, contexts, counts,
        batch, rows, state.idle, state.scratch_page * page_size, page_size, BLOCK, num_warps=1,
    )  # fmt: skip
    return StepInputs(tokens, positions, cache_slots, row_slots, starts, contexts, counts)


# Specializing on these would recompile the kernel for each step shape.
@kernel(do_not_specialize=["batch", "rows", "idle", "scratch"])
def _build(
    request_slots, draft_tokens, draft_stride, draft_lengths, starts,
    lengths, limits, last_tokens, page_tables, table_stride,
    out_tokens, out_positions, out_cache_slots, out_request_slots, out_contexts, out_counts,
    batch, rows, idle, scratch, page_size, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    # Rows after the last sequence belong to the idle slot.
    is_idle = sequence == batch
    end = rows
    slot = tl.full([], idle, tl.int64)
    context = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    if not is_idle:
        end = tl.load(starts + sequence + 1)
        slot = tl.load(request_slots + sequence)
        length = tl.load(lengths + slot)
        room = tl.load(limits + slot) - length
        # The target adds a bonus token after the draft.
        count = tl.where(room > 0, 1 + tl.minimum(tl.load(draft_lengths + sequence), room - 1), 0)
        context = tl.maximum(length - 1, 0)
        tl.store(out_contexts + sequence, context)
        tl.store(out_counts + sequence, count)
    last_token = tl.load(last_tokens + slot)
    for first in range(start, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        within = row - start
        is_own = row < end
        is_token = is_own & (within < count)
        position = context + within
        draft = tl.load(draft_tokens + sequence * draft_stride + within - 1, mask=is_token & (within > 0), other=0)
        token = tl.where(is_token & (within == 0), last_token, draft)
        page = tl.load(page_tables + slot * table_stride + position // page_size, mask=is_token, other=0)
        cache_slot = tl.where(is_token, page * page_size + position % page_size, scratch)
        tl.store(out_tokens + row, token.to(tl.int64), mask=is_own)
        tl.store(out_positions + row, tl.where(is_token, position, 0).to(tl.int64), mask=is_own)
        tl.store(out_cache_slots + row, cache_slot.to(tl.int64), mask=is_own)
        tl.store(out_request_slots + row, slot + tl.zeros([BLOCK], tl.int64), mask=is_own)


build_inputs = Operation(_build_reference, _build_kernel)
