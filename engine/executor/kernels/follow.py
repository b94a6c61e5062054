"""What of prepared drafts follows tokens that the host does not know yet; `ssd.follow` on the device, for paths.

On a GPU one kernel does it, with a program for each sequence; elsewhere PyTorch's operations do.
"""

from __future__ import annotations

from torch import Tensor

from engine.executor.device_state import DeviceState
from engine.executor.kernels import follow_torch
from engine.executor.kernels.tensors import Drafts, Prepared
from engine.executor.optional import has_triton


def followed(state: DeviceState, seats: Tensor, prepared: Prepared, width: int) -> Drafts:
    """The parts behind the tokens that were committed meanwhile, up to `width` each.

    A path that does not begin with all of those leaves nothing. seats: int64 [B].
    """
    if seats.is_cuda and has_triton():
        from engine.executor.kernels import follow_triton

        return follow_triton.followed(state, seats, prepared, width)
    return follow_torch.followed(state, seats, prepared, width)
