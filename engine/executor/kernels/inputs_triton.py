"""The inputs of a step of paths as a Triton kernel, one program a sequence; see `engine.executor.kernels.inputs`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.executor.device_state import DeviceState
from engine.executor.kernels.drafted import Drafted, Drafts, StepInputs

BLOCK = 32
"""Rows that a program makes at a time."""


def build_inputs(
    state: DeviceState, seats: Tensor, scheduled: Tensor, drafts: Drafts, starts: Tensor, rows: int, page_size: int
) -> StepInputs:
    """See `engine.executor.kernels.inputs.build_inputs`."""
    batch, device = len(seats), seats.device
    of_rows = [torch.empty(rows, dtype=torch.int64, device=device) for _ in range(4)]
    of_sequences = [torch.empty(batch, dtype=torch.int32, device=device) for _ in range(5)]
    _make[(batch + 1,)](
        seats, scheduled, drafts.tokens, drafts.tokens.stride(0), drafts.lengths, starts,
        state.lengths, state.computed, state.limits, state.history, state.history.stride(0),
        state.page_tables, state.page_tables.stride(0), *of_rows, *of_sequences,
        batch, rows, state.idle, state.scratch_page * page_size, page_size, BLOCK, num_warps=1,
    )  # fmt: skip
    tokens, positions, slots, row_seats = of_rows
    contexts, lengths, firsts, counts, runs = of_sequences
    drafted = Drafted(tokens, firsts, counts, runs, seats)
    return StepInputs(tokens, positions, slots, row_seats, starts, contexts, lengths, drafted)


# Else each shape of step would be compiled for itself.
@triton.jit(do_not_specialize=["batch", "rows", "idle", "scratch"])
def _make(
    seats, scheduled, draft_tokens, draft_stride, draft_lengths, starts,
    lengths, computed, limits, history, history_stride, page_tables, table_stride,
    out_tokens, out_positions, out_slots, out_seats, out_contexts, out_lengths, out_firsts, out_counts, out_runs,
    batch, rows, idle, scratch, page_size, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    # Behind the last sequence the idle one follows.
    is_idle = sequence == batch
    end = rows
    seat = tl.full([], idle, tl.int64)
    runs = tl.zeros([], tl.int32)
    drafted = tl.zeros([], tl.int32)
    context = tl.zeros([], tl.int32)
    if not is_idle:
        end = tl.load(starts + sequence + 1)
        seat = tl.load(seats + sequence)
        context = tl.load(computed + seat)
        length = tl.load(lengths + seat)
        room = tl.load(limits + seat) - length
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
        counts_in = is_own & (within < runs + drafted)
        place = context + within
        node = within - runs
        committed = tl.load(history + seat * history_stride + place, mask=counts_in & (node < 0), other=0)
        draft = tl.load(draft_tokens + sequence * draft_stride + node, mask=counts_in & (node >= 0), other=0)
        page = tl.load(page_tables + seat * table_stride + place // page_size, mask=counts_in, other=0)
        slot = tl.where(counts_in, page * page_size + place % page_size, scratch)
        tl.store(out_tokens + row, (committed + draft).to(tl.int64), mask=is_own)
        tl.store(out_positions + row, tl.where(counts_in, place, 0).to(tl.int64), mask=is_own)
        tl.store(out_slots + row, slot.to(tl.int64), mask=is_own)
        tl.store(out_seats + row, seat + tl.zeros([BLOCK], tl.int64), mask=is_own)
