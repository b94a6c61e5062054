"""Verification on the device in PyTorch's own operations: for CPUs, and what the kernels are held against."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.executor.device_state import DeviceState
from engine.executor.kernels.drafted import Drafted, Verified


class Rows(NamedTuple):
    """`Drafted` as a grid, [B, W]."""

    at: Tensor
    """int64: into the flat rows; any row where there is none."""
    exist: Tensor
    """bool."""
    tokens: Tensor
    """int64."""
    parents: Tensor
    """int64: the row of each token's parent, counted from the sequence's first row; 0 for that row itself."""


def verify(state: DeviceState, drafted: Drafted, chosen: Tensor, width: int) -> Verified:
    """See `engine.executor.kernels.verify.verify`."""
    rows = _grid(drafted, width)
    own = chosen[rows.at]
    agrees = (rows.tokens == own.gather(1, rows.parents)) & rows.exist
    kept = _accepted(agrees, rows.parents) & rows.exist
    last = torch.where(kept, torch.arange(width, device=kept.device), 0).amax(dim=1)
    return _commit(state, drafted, rows.tokens, kept, own.gather(1, last[:, None]))


def _grid(drafted: Drafted, width: int) -> Rows:
    column = torch.arange(width, device=drafted.starts.device)
    at = (drafted.starts[:, None] + column).clamp(max=len(drafted.tokens) - 1).long()
    parents = (column - 2).expand(at.shape) if drafted.parents is None else drafted.parents[at].long()
    exist = column < drafted.counts[:, None]
    return Rows(at, exist, drafted.tokens[at], torch.where(exist & (column > 0), parents + 1, 0))


def _accepted(agrees: Tensor, parents: Tensor) -> Tensor:
    """bool [B, W]: the rows on the one path that agrees, from the context's row on."""
    column = torch.arange(parents.shape[1], device=parents.device)
    # Of siblings that are the same token the first counts.
    are_siblings = (parents[:, :, None] == parents[:, None, :]) & (column[:, None] > column) & (column > 0)
    kept = (agrees & ~(are_siblings & agrees[:, None, :]).any(dim=2)) | (column == 0)
    # Whether all ancestors are kept too, twice as many of them in each round.
    up = parents
    for _ in range((len(column) - 1).bit_length()):
        kept = kept & kept.gather(1, up)
        up = up.gather(1, up)
    return kept


def _commit(state: DeviceState, drafted: Drafted, tokens: Tensor, kept: Tensor, bonus: Tensor) -> Verified:
    """Pack what was produced, and note it in the state. `kept` is the path's rows, [B, W]; bonus: [B, 1]."""
    column = torch.arange(kept.shape[1], device=kept.device)
    counts = kept.sum(dim=1)
    accepted = (counts - 1).clamp(min=0)
    path = _packed(tokens, kept)
    produced = torch.where(column < accepted[:, None], path.roll(-1, dims=1), bonus)
    produced = torch.where(column < counts[:, None], produced, 0).int()
    verified = Verified(produced, _packed(column.expand(kept.shape), kept).int(), counts.int())
    seats, lengths = drafted.seats, state.lengths[drafted.seats]
    written = column < counts[:, None]
    # The idle seat takes what is not to be written.
    rows = torch.where(written, seats[:, None], state.idle)
    state.history[rows, torch.where(written, lengths[:, None] + column, 0)] = produced
    last = produced.gather(1, accepted[:, None])[:, 0]
    state.last_tokens[seats] = torch.where(counts > 0, last, state.last_tokens[seats])
    state.lengths[seats] = lengths + verified.counts
    state.computed[seats] = state.computed[seats] + drafted.scheduled + accepted.int()
    return verified


def _packed(values: Tensor, kept: Tensor) -> Tensor:
    """The kept values of each row moved to its beginning, 0 behind them."""
    width = kept.shape[1]
    places = torch.where(kept, kept.cumsum(dim=1) - 1, width)
    return values.new_zeros(len(kept), width + 1).scatter(1, places, values)[:, :width]
