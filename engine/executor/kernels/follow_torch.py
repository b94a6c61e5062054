"""What follows of prepared drafts in PyTorch's own operations: for CPUs, and what the kernel is held against."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.executor.device_state import DeviceState
from engine.executor.kernels.tensors import Drafts, Prepared


def followed(state: DeviceState, seats: Tensor, prepared: Prepared, width: int) -> Drafts:
    """See `engine.executor.kernels.follow.followed`."""
    size = prepared.tokens.shape[1]
    committed = (state.lengths[seats] - prepared.lengths)[:, None]
    column = torch.arange(size, device=seats.device)
    places = (prepared.lengths[:, None] + column).clamp(max=state.history.shape[1] - 1)
    agrees = prepared.tokens == state.history[seats[:, None], places]
    fits = (agrees | (column >= committed)).all(dim=1)
    left = torch.minimum(prepared.sizes - committed[:, 0], prepared.most).clamp(0, width)
    places = (committed + torch.arange(width, device=seats.device)).clamp(max=size - 1)
    left = torch.where(fits, left, 0)
    tokens = prepared.tokens.gather(1, places)
    return Drafts(torch.where(torch.arange(width, device=seats.device) < left[:, None], tokens, 0), left)
