"""Build the inputs of a step on the device, at a fixed number of rows, as a CUDA graph needs them.

The host need not know the sequences' lengths: the device has them in its state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.executor.device_state import DeviceState
from engine.executor.kernels.dispatch import Operation, kernel
from engine.executor.kernels.tensors import Drafts, StepInputs, VerifyRows

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 32
"""Number of rows that a program of the kernel makes at a time."""


def _build_reference(
    state: DeviceState,
    request_slots: Tensor,
    scheduled: Tensor,
    drafts: Drafts,
    starts: Tensor,
    rows: int,
    page_size: int,
) -> StepInputs:
    """Return the inputs of a step of `rows` (N) rows.

    request_slots: int64 [B]. scheduled: int32 [B], number of committed tokens to run, at least 1. starts: int32
    [B + 1], as in `StepInputs`, with room for those tokens and the draft behind them. The draft of a sequence is
    ignored unless all of its committed tokens run.
    """
    size = drafts.tokens.shape[1]
    computed, lengths = state.computed[request_slots], state.lengths[request_slots]
    room = state.limits[request_slots] - lengths
    runs = torch.where(room > 0, scheduled, 0)
    produces = (computed + runs == lengths) & (runs > 0)
    # The target adds a token of its own behind the draft.
    drafted = torch.where(produces, torch.minimum(drafts.lengths, room - 1), 0)
    total = runs + drafted
    row = torch.arange(rows, device=request_slots.device, dtype=torch.int32)
    # Rows behind the last sequence belong to the idle slot.
    owner = torch.searchsorted(starts[1:], row, right=True)
    slot = pad(request_slots, (0, 1), value=state.idle)[owner]
    within = row - starts[owner]
    is_token = within < pad(total, (0, 1))[owner]
    draft_index = within - pad(runs, (0, 1))[owner]
    positions = torch.where(is_token, state.computed[slot] + within, 0)
    tokens = _entry(state.history, slot, torch.where(draft_index < 0, positions, 0))
    if size:
        draft_tokens = drafts.tokens[owner.clamp(max=len(request_slots) - 1), draft_index.clamp(0, size - 1)]
        tokens = torch.where(draft_index < 0, tokens, draft_tokens)
    pages = _entry(state.page_tables, slot, positions // page_size)
    cache_slots = torch.where(is_token, pages * page_size + positions % page_size, state.scratch_page * page_size)
    tokens = torch.where(is_token, tokens, 0).long()
    return StepInputs(
        tokens=tokens,
        positions=positions.long(),
        cache_slots=cache_slots.long(),
        request_slots=slot,
        starts=starts,
        contexts=computed,
        lengths=total,
        verify_rows=VerifyRows(
            tokens=tokens,
            starts=starts[:-1] + scheduled - 1,
            counts=torch.where(produces, drafted + 1, 0).int(),
            scheduled=runs,
            request_slots=request_slots,
        ),
    )


def _entry(table: Tensor, slots: Tensor, columns: Tensor) -> Tensor:
    """Return one entry of each slot's row, [N]; the last one for columns behind it."""
    return table[slots, columns.clamp(max=table.shape[1] - 1)]


def _build_kernel(
    state: DeviceState,
    request_slots: Tensor,
    scheduled: Tensor,
    drafts: Drafts,
    starts: Tensor,
    rows: int,
    page_size: int,
) -> StepInputs:
    """Run one program for each sequence, and one for the rows behind the last."""
    batch, device = len(request_slots), request_slots.device
    row_outputs = [torch.empty(rows, dtype=torch.int64, device=device) for _ in range(4)]
    sequence_outputs = [torch.empty(batch, dtype=torch.int32, device=device) for _ in range(5)]
    _build[(batch + 1,)](
        request_slots, scheduled, drafts.tokens, drafts.tokens.stride(0), drafts.lengths, starts,
        state.lengths, state.computed, state.limits, state.history, state.history.stride(0),
        state.page_tables, state.page_tables.stride(0), *row_outputs, *sequence_outputs,
        batch, rows, state.idle, state.scratch_page * page_size, page_size, BLOCK, num_warps=1,
    )  # fmt: skip
    tokens, positions, cache_slots, row_slots = row_outputs
    contexts, lengths, firsts, counts, runs = sequence_outputs
    verify_rows = VerifyRows(tokens, firsts, counts, runs, request_slots)
    return StepInputs(tokens, positions, cache_slots, row_slots, starts, contexts, lengths, verify_rows)


# Specialised on these, the kernel would be compiled anew for each shape of step.
@kernel(do_not_specialize=["batch", "rows", "idle", "scratch"])
def _build(
    request_slots, scheduled, draft_tokens, draft_stride, draft_lengths, starts,
    lengths, computed, limits, history, history_stride, page_tables, table_stride,
    out_tokens, out_positions, out_cache_slots, out_request_slots,
    out_contexts, out_lengths, out_firsts, out_counts, out_runs,
    batch, rows, idle, scratch, page_size, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    # Rows behind the last sequence belong to the idle slot.
    is_idle = sequence == batch
    end = rows
    slot = tl.full([], idle, tl.int64)
    runs = tl.zeros([], tl.int32)
    drafted = tl.zeros([], tl.int32)
    context = tl.zeros([], tl.int32)
    if not is_idle:
        end = tl.load(starts + sequence + 1)
        slot = tl.load(request_slots + sequence)
        context = tl.load(computed + slot)
        length = tl.load(lengths + slot)
        room = tl.load(limits + slot) - length
        asked = tl.load(scheduled + sequence)
        runs = tl.where(room > 0, asked, 0)
        produces = (context + runs == length) & (runs > 0)
        # The target adds a token of its own behind the draft.
        drafted = tl.where(produces, tl.minimum(tl.load(draft_lengths + sequence), room - 1), 0)
        tl.store(out_contexts + sequence, context)
        tl.store(out_lengths + sequence, runs + drafted)
        tl.store(out_firsts + sequence, start + asked - 1)
        tl.store(out_counts + sequence, tl.where(produces, drafted + 1, 0))
        tl.store(out_runs + sequence, runs)
    for first in range(start, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        within = row - start
        is_own = row < end
        is_token = is_own & (within < runs + drafted)
        position = context + within
        draft_index = within - runs
        committed = tl.load(history + slot * history_stride + position, mask=is_token & (draft_index < 0), other=0)
        draft = tl.load(
            draft_tokens + sequence * draft_stride + draft_index, mask=is_token & (draft_index >= 0), other=0
        )
        page = tl.load(page_tables + slot * table_stride + position // page_size, mask=is_token, other=0)
        cache_slot = tl.where(is_token, page * page_size + position % page_size, scratch)
        tl.store(out_tokens + row, (committed + draft).to(tl.int64), mask=is_own)
        tl.store(out_positions + row, tl.where(is_token, position, 0).to(tl.int64), mask=is_own)
        tl.store(out_cache_slots + row, cache_slot.to(tl.int64), mask=is_own)
        tl.store(out_request_slots + row, slot + tl.zeros([BLOCK], tl.int64), mask=is_own)


build_inputs = Operation(_build_reference, _build_kernel)
