"""What of prepared drafts follows tokens that the host does not know yet; `ssd.follow` on the device, for paths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.device.inputs import Drafts
from engine.device.state import DeviceState


class Prepared(NamedTuple):
    """Paths of B sequences, made for a text that may have grown since; padded to P tokens each."""

    tokens: Tensor
    """int32 [B, P]."""
    sizes: Tensor
    """int32 [B]: tokens that count."""
    lengths: Tensor
    """int32 [B]: of the texts that they follow."""
    most: Tensor
    """int32 [B]: tokens to verify at most."""


def followed(state: DeviceState, seats: Tensor, prepared: Prepared, width: int) -> Drafts:
    """The parts behind the tokens that were committed meanwhile, up to `width` each.

    A path that does not begin with all of those leaves nothing. seats: int64 [B].
    """
    size = prepared.tokens.shape[1]
    committed = (state.lengths[seats] - prepared.lengths)[:, None]
    column = torch.arange(size, device=seats.device)
    places = (prepared.lengths[:, None] + column).clamp(max=state.history.shape[1] - 1)
    agrees = prepared.tokens == state.history[seats[:, None], places]
    fits = (agrees | (column >= committed)).all(dim=1)
    left = torch.minimum(prepared.sizes - committed[:, 0], prepared.most).clamp(0, width)
    places = (committed + torch.arange(width, device=seats.device)).clamp(max=size - 1)
    return Drafts(prepared.tokens.gather(1, places), torch.where(fits, left, 0), None)
