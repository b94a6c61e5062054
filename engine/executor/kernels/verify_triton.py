"""Verification as Triton kernels, one program a sequence; see `engine.executor.kernels.verify`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.executor.device_state import DeviceState
from engine.executor.kernels.drafted import Drafted, Verified


def verify(state: DeviceState, drafted: Drafted, chosen: Tensor, width: int) -> Verified:
    """See `engine.executor.kernels.verify.verify`."""
    verified = _nothing(drafted, width)
    block = triton.next_power_of_2(width)
    _verify[(len(drafted.seats),)](
        chosen, *_of(drafted), *_kept_in(state), *verified, width, drafted.parents is not None, block, num_warps=1
    )
    return verified


def _nothing(drafted: Drafted, width: int) -> Verified:
    batch, device = len(drafted.seats), drafted.seats.device
    shapes = ((batch, width), (batch, width), (batch,))
    return Verified(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes))


def _of(drafted: Drafted) -> tuple[Tensor, ...]:
    # Without parents the kernel reads none, whatever stands there.
    parents = drafted.starts if drafted.parents is None else drafted.parents
    return drafted.tokens, parents, drafted.starts, drafted.counts, drafted.scheduled, drafted.seats


def _kept_in(state: DeviceState) -> tuple[Tensor | int, ...]:
    return state.lengths, state.computed, state.last_tokens, state.history, state.history.stride(0)


@triton.jit
def _verify(
    chosen,
    tokens, parents, starts, counts, scheduled, seats,
    lengths, computed, last_tokens, history, history_stride,
    out_tokens, out_rows, out_counts,
    width, IS_TREE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    row = tl.arange(0, BLOCK)
    drafted = (row > 0) & (row < count)
    parent = tl.load(parents + start + row, mask=drafted, other=-1) + 1 if IS_TREE else row - 1
    token = tl.load(tokens + start + row, mask=drafted, other=-1)
    agrees = drafted & (token == tl.load(chosen + start + parent, mask=drafted, other=-2))
    kept = row == 0
    at = 0
    if IS_TREE:
        child = tl.min(tl.where(agrees & (parent == 0), row, BLOCK), axis=0)
        while child < BLOCK:
            kept = kept | (row == child)
            at = child
            child = tl.min(tl.where(agrees & (parent == at), row, BLOCK), axis=0)
    else:
        first_wrong = tl.min(tl.where(agrees | (row == 0), BLOCK, row), axis=0)
        kept = row < first_wrong
        at = first_wrong - 1
    bonus = tl.load(chosen + start + at, mask=count > 0, other=0)
    _commit(
        sequence, kept & (row < count), token, bonus,
        scheduled, seats, lengths, computed, last_tokens, history, history_stride,
        out_tokens, out_rows, out_counts, width, BLOCK,
    )  # fmt: skip


@triton.jit
def _commit(
    sequence, kept, token, bonus,
    scheduled, seats, lengths, computed, last_tokens, history, history_stride,
    out_tokens, out_rows, out_counts, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pack what was produced, and note it in the state. `kept` is the path's rows, `token` the tokens in them."""
    row = tl.arange(0, BLOCK)
    produced = tl.sum(kept.to(tl.int32), axis=0)
    accepted = tl.maximum(produced - 1, 0)
    rank = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    seat = tl.load(seats + sequence)
    length = tl.load(lengths + seat)
    own = history + seat * history_stride + length
    is_drafted = kept & (row > 0)
    # All threads must have read the length before one of them writes it.
    tl.debug_barrier()
    # A draft token comes from the row of its parent, so it stands one place before its own row.
    line = sequence * width
    tl.store(out_tokens + line + rank - 1, token.to(tl.int32), mask=is_drafted)
    tl.store(own + rank - 1, token.to(tl.int32), mask=is_drafted)
    tl.store(out_rows + line + rank, row, mask=kept)
    tl.store(out_tokens + line + row, tl.zeros([BLOCK], tl.int32), mask=(row >= produced) & (row < width))
    tl.store(out_rows + line + row, tl.zeros([BLOCK], tl.int32), mask=(row >= produced) & (row < width))
    tl.store(out_counts + sequence, produced)
    if produced > 0:
        tl.store(out_tokens + line + accepted, bonus.to(tl.int32))
        tl.store(own + accepted, bonus.to(tl.int32))
        tl.store(last_tokens + seat, bonus.to(tl.int32))
        tl.store(lengths + seat, length + produced)
    tl.store(computed + seat, tl.load(computed + seat) + tl.load(scheduled + sequence) + accepted)
