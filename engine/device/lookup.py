"""Drafts from a sequence's own text, found on the device: for a step whose prepared draft does not fit.

Where the text's last tokens stood before, what followed them is drafted: prompt lookup (Saxena, 2023). It needs nothing
from the host, so it knows the last token even while the host does not. On a GPU one kernel does it, with a program for
each sequence; elsewhere PyTorch's operations do.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from engine.device.state import DeviceState

LONGEST = 4
"""Tokens of a match at most; 8 and 16 gained nothing on recorded traffic."""


def looked_up(state: DeviceState, seats: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Up to `width` tokens that may follow each text, int32 [B, width], and how many, int32 [B]; 0 behind them.

    They follow the longest match of the text's end, the latest of several; `2 ** length` tokens of it, since long
    matches go on for longer. What runs on to the text's end begins again at the match. seats: int64 [B].
    """
    if state.history.is_cuda and find_spec("triton") is not None:
        from engine.device import lookup_triton

        return lookup_triton.looked_up(state, seats, width)
    texts, lengths = state.history[seats], state.lengths[seats].long()[:, None]
    place = torch.arange(texts.shape[1], device=texts.device)
    agrees = (place < lengths).expand(texts.shape)
    matches = torch.zeros_like(texts, dtype=torch.int64)
    for back in range(1, LONGEST + 1):
        last = texts.gather(1, (lengths - back).clamp(min=0))
        agrees = agrees & (place >= back) & (texts.roll(back, dims=1) == last)
        matches = matches + agrees
    best = (matches * texts.shape[1] + place).amax(dim=1, keepdim=True)
    match, place = best // texts.shape[1], best % texts.shape[1]
    counts = torch.where(match > 0, 2**match, 0).clamp(max=width)
    column = torch.arange(width, device=texts.device)
    tokens = texts.gather(1, place + column % (lengths - place).clamp(min=1))
    return torch.where(column < counts, tokens, 0), counts[:, 0].int()
