"""Verification on the device in PyTorch's own operations: for CPUs, and what the kernels are held against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.executor.device_state import DeviceState
from engine.executor.kernels.drafted import Drafted, Verified


def verify(state: DeviceState, drafted: Drafted, chosen: Tensor, width: int) -> Verified:
    """See `engine.executor.kernels.verify.verify`."""
    column = torch.arange(width, device=chosen.device)
    at = (drafted.starts[:, None] + column).clamp(max=len(drafted.tokens) - 1).long()
    exist = column < drafted.counts[:, None]
    tokens, own = drafted.tokens[at], chosen[at]
    # A draft token is kept if the row before it, and all before that, chose their successors.
    agrees = pad(tokens[:, 1:] == own[:, :-1], (1, 0), value=True) & exist
    counts = agrees.cumprod(dim=1).sum(dim=1)
    accepted = (counts - 1).clamp(min=0)
    produced = torch.where(column < counts[:, None], own, 0).int()
    lengths = state.lengths[drafted.seats]
    written = column < counts[:, None]
    # The idle seat takes what is not to be written.
    rows = torch.where(written, drafted.seats[:, None], state.idle)
    state.history[rows, torch.where(written, lengths[:, None] + column, 0)] = produced
    last = produced.gather(1, accepted[:, None])[:, 0]
    state.last_tokens[drafted.seats] = torch.where(counts > 0, last, state.last_tokens[drafted.seats])
    state.lengths[drafted.seats] = lengths + counts.int()
    state.computed[drafted.seats] = state.computed[drafted.seats] + drafted.scheduled + accepted.int()
    return Verified(produced, counts.int())
