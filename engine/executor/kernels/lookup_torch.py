"""Prompt lookup in PyTorch's own operations: for CPUs, and what the kernel is held against."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.executor.device_state import DeviceState
from engine.executor.kernels.tensors import Drafts

LONGEST = 4
"""Tokens of a match at most; 8 and 16 gained nothing on recorded traffic."""


def completed(state: DeviceState, seats: Tensor, drafts: Drafts, spare: Tensor) -> tuple[Drafts, Tensor]:
    """See `engine.executor.kernels.lookup.completed`."""
    found, counts = looked_up(state, seats, drafts.tokens.shape[1])
    counts = torch.minimum(counts, spare)
    is_found = (drafts.lengths == 0) & (counts > 0)
    lengths = torch.where(is_found, counts, drafts.lengths)
    tokens = torch.where(is_found[:, None], found, drafts.tokens)
    column = torch.arange(tokens.shape[1], device=tokens.device)
    return Drafts(torch.where(column < lengths[:, None], tokens, 0), lengths), is_found.int()


def looked_up(state: DeviceState, seats: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Up to `width` tokens for each text, int32 [B, width], and how many, int32 [B]."""
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
