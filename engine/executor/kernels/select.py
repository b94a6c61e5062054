"""Select drafts by the outcome of the previous step, which is known only on the device when a step is launched.

The host sends each sequence's drafts for the likely outcomes of the step in flight. A draft's key is the sequence's
length after the outcome, which determines the number of accepted tokens, and its last token, the bonus token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from engine.executor.device_state import DeviceState
from engine.executor.kernels.dispatch import Operation, kernel, next_power_of_2
from engine.executor.kernels.tensors import Drafts

if TYPE_CHECKING:
    import triton.language as tl


class OutcomeTensors(NamedTuple):
    """Up to K outcomes for each of B sequences, each with a path of up to P draft tokens; views of one tensor."""

    lengths: Tensor
    """int32 [B, K]: number of committed tokens after the outcome; 0 for an unused row."""
    last_tokens: Tensor
    """int32 [B, K]: the last committed token after the outcome."""
    sizes: Tensor
    """int32 [B, K]: number of draft tokens."""
    tokens: Tensor
    """int32 [B, K, P], contiguous in the last dimension; the content after a draft is arbitrary."""


def _select_reference(state: DeviceState, request_slots: Tensor, table: OutcomeTensors, width: int) -> Drafts:
    """Return for each sequence the draft of the first row whose key is the state's length and last token.

    request_slots: int64 [B]. width: columns of the result; longer drafts are cut. A sequence without such a row gets an
    empty draft. Tokens after a draft are 0.
    """
    is_outcome = (table.lengths == state.lengths[request_slots][:, None]) & (
        table.last_tokens == state.last_tokens[request_slots][:, None]
    )
    row = is_outcome.to(torch.int32).argmax(dim=1, keepdim=True)
    sizes = torch.where(is_outcome.any(dim=1), table.sizes.gather(1, row)[:, 0].clamp(max=width), 0)
    columns = torch.arange(width, device=request_slots.device)
    path_size = table.tokens.shape[2]
    paths = table.tokens.gather(1, row[:, :, None].expand(-1, -1, path_size))[:, 0]
    tokens = paths.gather(1, columns.clamp(max=path_size - 1).expand(len(paths), -1))
    return Drafts(torch.where(columns < sizes[:, None], tokens, 0), sizes)


def _select_kernel(state: DeviceState, request_slots: Tensor, table: OutcomeTensors, width: int) -> Drafts:
    """Run one program for each sequence."""
    batch, device = len(request_slots), request_slots.device
    tokens = torch.empty(batch, width, dtype=torch.int32, device=device)
    sizes = torch.empty(batch, dtype=torch.int32, device=device)
    rows = table.lengths.shape[1]
    _select[(batch,)](
        request_slots, state.lengths, state.last_tokens,
        table.lengths, *table.lengths.stride(), table.last_tokens, *table.last_tokens.stride(),
        table.sizes, *table.sizes.stride(), table.tokens, *table.tokens.stride()[:2],
        tokens, sizes, rows, width,
        next_power_of_2(rows), next_power_of_2(max(1, width)), num_warps=1,
    )  # fmt: skip
    return Drafts(tokens, sizes)


@kernel()
def _select(
    request_slots, state_lengths, state_last_tokens,
    lengths, lengths_stride, lengths_step, last_tokens, last_tokens_stride, last_tokens_step,
    sizes, sizes_stride, sizes_step, tokens, tokens_stride, tokens_step,
    out_tokens, out_sizes, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    slot = tl.load(request_slots + sequence)
    row = tl.arange(0, ROWS)
    exists = row < rows
    length = tl.load(lengths + sequence * lengths_stride + row * lengths_step, mask=exists, other=0)
    last_token = tl.load(last_tokens + sequence * last_tokens_stride + row * last_tokens_step, mask=exists, other=0)
    is_outcome = (length == tl.load(state_lengths + slot)) & (last_token == tl.load(state_last_tokens + slot)) & exists
    found = tl.min(tl.where(is_outcome, row, ROWS), axis=0)
    size = tl.load(sizes + sequence * sizes_stride + found * sizes_step, mask=found < ROWS, other=0)
    size = tl.minimum(size, width)
    column = tl.arange(0, WIDTH)
    token = tl.load(tokens + sequence * tokens_stride + found * tokens_step + column, mask=column < size, other=0)
    tl.store(out_tokens + sequence * width + column, token, mask=column < width)
    tl.store(out_sizes + sequence, size)


select_drafts = Operation(_select_reference, _select_kernel)
