"""Verification as Triton kernels, one program a sequence; see `engine.executor.kernels.verify`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.executor.device_state import DeviceState
from engine.executor.kernels.drafted import Drafted, Verified
from engine.executor.kernels.noise_triton import gumbel, key, stream_seed, uniform
from engine.sampling.noise import Stream

VOCAB_BLOCK = 4096
ACCEPT = tl.constexpr(int(Stream.ACCEPT))


def verify(state: DeviceState, drafted: Drafted, chosen: Tensor, width: int) -> Verified:
    """See `engine.executor.kernels.verify.verify`."""
    verified = _nothing(drafted, width)
    block = triton.next_power_of_2(width)
    _verify[(len(drafted.seats),)](
        chosen, *_of(drafted), *_kept_in(state), *verified, width, drafted.parents is not None, block, num_warps=1
    )
    return verified


def reject(state: DeviceState, drafted: Drafted, p: Tensor, q: Tensor, q_starts: Tensor, width: int) -> Verified:
    """See `engine.executor.kernels.verify.reject`. Overwrites `p` and `q` by residuals."""
    verified = _nothing(drafted, width)
    block = triton.next_power_of_2(width)
    vocab = p.shape[1]
    vocab_block = min(VOCAB_BLOCK, triton.next_power_of_2(vocab))
    _reject[(len(drafted.seats),)](
        p, q, q_starts, state.seeds, *_of(drafted), *_kept_in(state), *verified,
        vocab, width, drafted.parents is not None, block, vocab_block, num_warps=8,
    )  # fmt: skip
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
def _reject(
    p, q, q_starts, seeds,
    tokens, parents, starts, counts, scheduled, seats,
    lengths, computed, last_tokens, history, history_stride,
    out_tokens, out_rows, out_counts,
    vocab, width, IS_TREE: tl.constexpr, BLOCK: tl.constexpr, VOCAB_BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    p += start.to(tl.int64) * vocab
    q += tl.load(q_starts + sequence).to(tl.int64) * vocab
    seat = tl.load(seats + sequence)
    seed = tl.load(seeds + seat).to(tl.uint64)
    accept_seed = stream_seed(seed, tl.full([], ACCEPT, tl.int64))
    place = tl.load(lengths + seat).to(tl.int64)
    row = tl.arange(0, BLOCK)
    kept = row == 0
    at = tl.zeros([], tl.int64)
    rank = tl.zeros([], tl.int64)
    for node in range(1, count):
        parent = tl.load(parents + start + node).to(tl.int64) + 1 if IS_TREE else tl.zeros([], tl.int64) + node - 1
        if parent == at:
            token = tl.load(tokens + start + node)
            p_drafted = tl.load(p + at * vocab + token).to(tl.float64)
            q_drafted = tl.load(q + at * vocab + token).to(tl.float64)
            if uniform(key(accept_seed, place), rank) * q_drafted < p_drafted:
                kept = kept | (row == node)
                at = tl.zeros([], tl.int64) + node
                place += 1
                rank = tl.zeros([], tl.int64)
            else:
                _leave_rest(p + at * vocab, q + at * vocab, token, vocab, VOCAB_BLOCK)
                rank += 1
    bonus = tl.zeros([], tl.int64)
    if count > 0:
        bonus = _drawn(p + at * vocab, key(seed, place), vocab, VOCAB_BLOCK)
    drafted = tl.load(tokens + start + row, mask=(row > 0) & (row < count), other=0)
    _commit(
        sequence, kept & (row < count), drafted, bonus,
        scheduled, seats, lengths, computed, last_tokens, history, history_stride,
        out_tokens, out_rows, out_counts, width, BLOCK,
    )  # fmt: skip


@triton.jit
def _leave_rest(p, q, refused, vocab, VOCAB_BLOCK: tl.constexpr):
    """Make of p what is left once a candidate was refused, max(p - q, 0), and of q the rest; both normalised."""
    # All threads must have read the candidate's odds, and written what an earlier refusal left.
    tl.debug_barrier()
    p_left = tl.zeros([], tl.float64)
    q_left = tl.zeros([], tl.float64)
    for first in range(0, vocab, VOCAB_BLOCK):
        token = first + tl.arange(0, VOCAB_BLOCK)
        target = tl.load(p + token, mask=token < vocab, other=0)
        drafter = tl.load(q + token, mask=token < vocab, other=0)
        p_left += tl.sum(tl.maximum(target - drafter, 0).to(tl.float64), axis=0)
        q_left += tl.sum(tl.where(token == refused, 0, drafter).to(tl.float64), axis=0)
    dtype = p.dtype.element_ty
    # Where rounding refuses a candidate although p = q, nothing is left.
    is_left = p_left > 0
    p_total = tl.where(is_left, p_left, 1.0).to(dtype)
    q_total = tl.where(q_left > 0, q_left, 1.0).to(dtype)
    for first in range(0, vocab, VOCAB_BLOCK):
        token = first + tl.arange(0, VOCAB_BLOCK)
        target = tl.load(p + token, mask=token < vocab, other=0)
        drafter = tl.load(q + token, mask=token < vocab, other=0)
        rest = _divided(tl.maximum(target - drafter, 0), p_total)
        tl.store(p + token, tl.where(is_left, rest, target), mask=token < vocab)
        tl.store(q + token, _divided(tl.where(token == refused, 0, drafter), q_total), mask=token < vocab)
    tl.debug_barrier()


@triton.jit
def _divided(values, total):
    """Rounded as PyTorch rounds: in float32 Triton's own division is not."""
    return (values.to(tl.float64) / total.to(tl.float64)).to(values.dtype)


@triton.jit
def _drawn(odds, key, vocab, VOCAB_BLOCK: tl.constexpr):
    """A token from a distribution, with the noise of plain decoding, int64."""
    best = tl.full([], float("-inf"), tl.float64)
    best_token = tl.zeros([], tl.int64)
    for first in range(0, vocab, VOCAB_BLOCK):
        token = first + tl.arange(0, VOCAB_BLOCK)
        weight = tl.load(odds + token, mask=token < vocab, other=0)
        logarithm = tl.log(tl.where(weight > 0, weight, 1).to(tl.float64)).to(weight.dtype)
        score = tl.where(weight > 0, logarithm + gumbel(key, token), float("-inf")).to(tl.float64)
        block_best, block_token = tl.max(score, axis=0, return_indices=True)
        is_better = block_best > best
        best = tl.where(is_better, block_best, best)
        best_token = tl.where(is_better, (first + block_token).to(tl.int64), best_token)
    return best_token


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
