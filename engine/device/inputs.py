"""The inputs of a step, made on the device at fixed shapes: what a CUDA graph needs, and the host need not know."""

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
    """A grid of B sequences by Q tokens. Padding is token 0 at position 0, and its keys and values go to scratch."""

    tokens: Tensor
    """int64 [B * Q]."""
    positions: Tensor
    """int64 [B * Q]: within each token's text."""
    slots: Tensor
    """int64 [B * Q]: page * page_size + offset."""
    contexts: Tensor
    """int32 [B]: tokens before, whose keys and values are in the cache."""
    lengths: Tensor
    """int32 [B]: tokens of each sequence that are none of padding."""
    logit_rows: Tensor
    """int64 [B * (K + 1)]: the tokens whose logits are needed; row 0 of a sequence where none is."""
    drafted: Drafted
    """Those rows as `verify` takes them."""


def build_inputs(
    state: DeviceState, seats: Tensor, scheduled: Tensor, drafts: Drafts, width: int, page_size: int
) -> StepInputs:
    """The inputs of a step of `width` (Q) tokens a sequence.

    seats: int64 [B]. scheduled: int32 [B], committed tokens to run, at least 1 but for padding; with a draft behind
    them at most Q. A sequence that does not run all of its committed tokens ignores its draft.
    """
    size = drafts.tokens.shape[1]
    computed, lengths = state.computed[seats], state.lengths[seats]
    room = state.limits[seats] - lengths
    scheduled = torch.where(room > 0, scheduled, 0)
    produces = (computed + scheduled == lengths) & (scheduled > 0)
    # The target adds a token of its own behind the draft.
    drafted = torch.where(produces, torch.minimum(drafts.lengths, room - 1), 0)
    total = scheduled + drafted
    column = torch.arange(width, device=seats.device)
    counts_in = column < total[:, None]
    within = column - scheduled[:, None]
    places = torch.where(counts_in, computed[:, None] + column, 0)
    committed = _at(state.history, seats, torch.where(within < 0, places, 0))
    parents = _path(drafts) if drafts.parents is None else drafts.parents
    nodes = within.clamp(0, max(size - 1, 0)).long()
    if size:
        tokens = torch.where(within < 0, committed, drafts.tokens.gather(1, nodes))
        ahead = depths(parents).gather(1, nodes)
        positions = torch.where(within < 0, places, lengths[:, None] - 1 + ahead)
    else:
        tokens, positions = committed, places
    pages = _at(state.page_tables, seats, places // page_size)
    slots = torch.where(counts_in, pages * page_size + places % page_size, state.scratch_page * page_size)
    counts = torch.where(produces, drafted + 1, 0)
    tokens = torch.where(counts_in, tokens, 0).long().flatten()
    row = torch.arange(size + 1, device=seats.device)
    first = torch.arange(len(seats), device=seats.device) * width
    logit_rows = first[:, None] + torch.where(row < counts[:, None], scheduled[:, None] - 1 + row, 0)
    return StepInputs(
        tokens=tokens,
        positions=torch.where(counts_in, positions, 0).long().flatten(),
        slots=slots.long().flatten(),
        contexts=computed,
        lengths=total,
        logit_rows=logit_rows.flatten(),
        drafted=Drafted(
            tokens=tokens[logit_rows.flatten()],
            parents=None if drafts.parents is None else pad(drafts.parents, (1, 0)).flatten(),
            starts=torch.arange(len(seats), device=seats.device, dtype=torch.int32) * (size + 1),
            counts=counts.int(),
            scheduled=scheduled,
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
    slots = inputs.slots[inputs.logit_rows].view(verified.rows.shape)
    column = torch.arange(slots.shape[1], device=slots.device)
    moves = (column < verified.counts[:, None]) & (verified.rows != column)
    scratch = state.scratch_page * page_size
    sources = torch.where(moves, slots.gather(1, verified.rows.long()), scratch)
    return sources[:, 1:].flatten(), torch.where(moves, slots, scratch)[:, 1:].flatten()


def _path(drafts: Drafts) -> Tensor:
    size = drafts.tokens.shape[1]
    return torch.arange(-1, size - 1, device=drafts.tokens.device).expand(drafts.tokens.shape)


def _at(table: Tensor, seats: Tensor, places: Tensor) -> Tensor:
    """Entries of the seats' rows, [B, Q]; places: int [B, Q], never below 0."""
    return table[seats[:, None], places.clamp(max=table.shape[1] - 1)]
