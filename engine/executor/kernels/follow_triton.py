"""What follows of prepared drafts as a Triton kernel, one program a sequence; see `engine.executor.kernels.follow`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.executor.device_state import DeviceState
from engine.executor.kernels.tensors import Drafts, Prepared


def followed(state: DeviceState, seats: Tensor, prepared: Prepared, width: int) -> Drafts:
    """See `engine.executor.kernels.follow.followed`."""
    batch, device = len(seats), seats.device
    tokens = torch.empty(batch, width, dtype=torch.int32, device=device)
    counts = torch.empty(batch, dtype=torch.int32, device=device)
    size = prepared.tokens.shape[1]
    sizes, lengths, most = prepared[1:]
    _follow[(batch,)](
        seats, state.lengths, state.history, state.history.stride(0), prepared.tokens, prepared.tokens.stride(0),
        sizes, sizes.stride(0), lengths, lengths.stride(0), most, most.stride(0), tokens, counts, size, width,
        triton.next_power_of_2(size), triton.next_power_of_2(max(1, width)), num_warps=1,
    )  # fmt: skip
    return Drafts(tokens, counts)


@triton.jit
def _follow(
    seats, lengths, history, history_stride, tokens, tokens_stride,
    sizes, sizes_stride, bases, bases_stride, most, most_stride, out_tokens, out_counts, size, width,
    SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    seat = tl.load(seats + sequence)
    base = tl.load(bases + sequence * bases_stride)
    path = tokens + sequence * tokens_stride
    committed = tl.load(lengths + seat) - base
    column = tl.arange(0, SIZE)
    came = (column < size) & (column < committed)
    prepared = tl.load(path + column, mask=came, other=0)
    produced = tl.load(history + seat * history_stride + base + column, mask=came, other=0)
    differs = tl.max((prepared != produced).to(tl.int32), axis=0)
    left = tl.minimum(tl.load(sizes + sequence * sizes_stride) - committed, tl.load(most + sequence * most_stride))
    left = tl.where(differs > 0, 0, tl.minimum(tl.maximum(left, 0), width))
    place = tl.arange(0, WIDTH)
    token = tl.load(path + committed + place, mask=place < left, other=0)
    tl.store(out_tokens + sequence * width + place, token, mask=place < width)
    tl.store(out_counts + sequence, left)
