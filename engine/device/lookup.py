"""Drafts from a sequence's own text, found on the device: for a step whose prepared draft does not fit.

Where the text's last tokens stood before, what followed them is drafted: prompt lookup (Saxena, 2023). It needs nothing
from the host, so it knows the last token even while the host does not. On a GPU one kernel does it, with a program for
each sequence; elsewhere PyTorch's operations do.
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor

from engine.device import lookup_torch
from engine.device.state import DeviceState


def looked_up(state: DeviceState, seats: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Up to `width` tokens that may follow each text, int32 [B, width], and how many, int32 [B]; 0 behind them.

    They follow the longest match of the text's end, the latest of several; `2 ** length` tokens of it, since long
    matches go on for longer. What runs on to the text's end begins again at the match. seats: int64 [B].
    """
    if seats.is_cuda and find_spec("triton") is not None:
        from engine.device import lookup_triton

        return lookup_triton.looked_up(state, seats, width)
    return lookup_torch.looked_up(state, seats, width)
