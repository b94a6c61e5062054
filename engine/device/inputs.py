"""The inputs of a step, made on the device at a fixed number of rows: what a CUDA graph needs, and the host need not
know.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.device.drafted import Drafted, Verified
from engine.device.state import DeviceState


class Drafts(NamedTuple):
    """Drafts of B sequences, padded to K tokens each."""

    tokens: Tensor
    """int32 [B, K]."""
    lengths: Tensor
    """int32 [B]: draft tokens that count; those beyond a sequence's room do not, whatever this says."""
    parents: Tensor | None
    """int32 [B, K], indices within the draft, -1 for a child of the context; None if all are paths."""


class StepInputs(NamedTuple):
    """N rows, of which each of B sequences has some, one behind the other. Behind a sequence's tokens, and behind the
    last sequence, they are padding: token 0 at position 0, whose keys and values go to scratch.
    """

    tokens: Tensor
    """int64 [N]."""
    positions: Tensor
    """int64 [N]: within each token's text."""
    slots: Tensor
    """int64 [N]: page * page_size + offset."""
    seats: Tensor
    """int64 [N]: whose rows they are; the idle seat's behind the last sequence."""
    starts: Tensor
    """int32 [B + 1]: where each sequence's rows begin, and where the last one's end."""
    contexts: Tensor
    """int32 [B]: tokens before, whose keys and values are in the cache."""
    lengths: Tensor
    """int32 [B]: tokens of each sequence that are none of padding."""
    drafted: Drafted
    """Those rows as `verify` takes them."""


def build_inputs(
    state: DeviceState, seats: Tensor, scheduled: Tensor, drafts: Drafts, starts: Tensor, rows: int, page_size: int
) -> StepInputs:
    """The inputs of a step of `rows` (N) rows.

    seats: int64 [B]. scheduled: int32 [B], committed tokens to run, at least 1. starts: as in `StepInputs`, with room
    for those and the draft behind them. A sequence that does not run all of its committed tokens ignores its draft.
    """
    size = drafts.tokens.shape[1]
    computed, lengths = state.computed[seats], state.lengths[seats]
    room = state.limits[seats] - lengths
    runs = torch.where(room > 0, scheduled, 0)
    produces = (computed + runs == lengths) & (runs > 0)
    # The target adds a token of its own behind the draft.
    drafted = torch.where(produces, torch.minimum(drafts.lengths, room - 1), 0)
    total = runs + drafted
    row = torch.arange(rows, device=seats.device, dtype=torch.int32)
    # Behind the last sequence the idle one follows.
    owner = torch.searchsorted(starts[1:], row, right=True)
    seat = pad(seats, (0, 1), value=state.idle)[owner]
    within = row - starts[owner]
    counts_in = within < pad(total, (0, 1))[owner]
    node = within - pad(runs, (0, 1))[owner]
    places = torch.where(counts_in, state.computed[seat] + within, 0)
    tokens = _at(state.history, seat, torch.where(node < 0, places, 0))
    positions = places
    parents = _path(drafts) if drafts.parents is None else drafts.parents
    if size:
        drafting, node_at = owner.clamp(max=len(seats) - 1), node.clamp(0, size - 1)
        tokens = torch.where(node < 0, tokens, drafts.tokens[drafting, node_at])
        ahead = depths(parents)[drafting, node_at]
        positions = torch.where(node < 0, places, state.lengths[seat] - 1 + ahead)
        parents = parents[drafting, node_at]
    pages = _at(state.page_tables, seat, places // page_size)
    slots = torch.where(counts_in, pages * page_size + places % page_size, state.scratch_page * page_size)
    tokens = torch.where(counts_in, tokens, 0).long()
    return StepInputs(
        tokens=tokens,
        positions=torch.where(counts_in, positions, 0).long(),
        slots=slots.long(),
        seats=seat,
        starts=starts,
        contexts=computed,
        lengths=total,
        drafted=Drafted(
            tokens=tokens,
            parents=None if drafts.parents is None or not size else parents,
            starts=starts[:-1] + scheduled - 1,
            counts=torch.where(produces, drafted + 1, 0).int(),
            scheduled=runs,
            seats=seats,
        ),
    )


def depths(parents: Tensor) -> Tensor:
    """How far behind the context each draft token stands, from 1, int64 [B, K]. parents: int32 [B, K], as in `Drafts`.

    Doubles the distance looked up in each round, so there are as many rounds as K has bits.
    """
    up = pad((parents + 1).long().clamp(0, parents.shape[1]), (1, 0))
    depth = torch.ones_like(up)
    depth[:, 0] = 0
    for _ in range(parents.shape[1].bit_length()):
        depth = depth + depth.gather(1, up)
        up = up.gather(1, up)
    return depth[:, 1:]


def compaction(state: DeviceState, inputs: StepInputs, verified: Verified, page_size: int) -> tuple[Tensor, Tensor]:
    """Slots to copy keys and values from and to, int64 [B * K] each, so that accepted paths of trees lie together.

    Read all sources before any target is written. What stays where it is, is copied within the scratch page.
    """
    column = torch.arange(verified.rows.shape[1], device=inputs.slots.device)
    rows = inputs.drafted.starts[:, None] + column
    slots = inputs.slots[rows.clamp(max=len(inputs.slots) - 1)]
    moves = (column < verified.counts[:, None]) & (verified.rows != column)
    scratch = state.scratch_page * page_size
    sources = torch.where(moves, slots.gather(1, verified.rows.long()), scratch)
    return sources[:, 1:].flatten(), torch.where(moves, slots, scratch)[:, 1:].flatten()


def _path(drafts: Drafts) -> Tensor:
    size = drafts.tokens.shape[1]
    return torch.arange(-1, size - 1, device=drafts.tokens.device).expand(drafts.tokens.shape)


def _at(table: Tensor, seats: Tensor, places: Tensor) -> Tensor:
    """An entry of each seat's row, [N]; places: int [N], never below 0."""
    return table[seats, places.clamp(max=table.shape[1] - 1)]
