"""Drafts from a sequence's own text, found on the device: for a step whose prepared draft does not fit.

Where the text's last tokens stood before, what followed them is drafted: prompt lookup (Saxena, 2023). It needs nothing
from the host, so it knows the last token even while the host does not. On a GPU one kernel does it, with a program for
each sequence; elsewhere PyTorch's operations do.
"""

from __future__ import annotations

from torch import Tensor

from engine.executor.device_state import DeviceState
from engine.executor.kernels import lookup_torch
from engine.executor.kernels.tensors import Drafts
from engine.executor.optional import has_triton


def completed(state: DeviceState, seats: Tensor, drafts: Drafts, spare: Tensor) -> tuple[Drafts, Tensor]:
    """The drafts, and where one is empty, up to `spare` tokens that may follow its text; and whether there are such.

    They follow the longest match of the text's end, the latest of several; `2 ** length` tokens of it, since long
    matches go on for longer. What runs on to the text's end begins again at the match. seats: int64 [B]. spare: int32
    [B]. Returns int32 [B] for whether. Drafts are paths, with 0 behind their tokens, and may be overwritten.
    """
    if seats.is_cuda and has_triton():
        from engine.executor.kernels import lookup_triton

        return lookup_triton.completed(state, seats, drafts, spare)
    return lookup_torch.completed(state, seats, drafts, spare)
