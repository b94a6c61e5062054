"""The inputs of a step in PyTorch's own operations: for CPUs, and what the kernel is held against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.executor.device_state import DeviceState
from engine.executor.kernels.drafted import Drafted, Drafts, StepInputs


def build_inputs(
    state: DeviceState, seats: Tensor, scheduled: Tensor, drafts: Drafts, starts: Tensor, rows: int, page_size: int
) -> StepInputs:
    """See `engine.executor.kernels.inputs.build_inputs`."""
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
    if size:
        drafting, node_at = owner.clamp(max=len(seats) - 1), node.clamp(0, size - 1)
        tokens = torch.where(node < 0, tokens, drafts.tokens[drafting, node_at])
    pages = _at(state.page_tables, seat, places // page_size)
    slots = torch.where(counts_in, pages * page_size + places % page_size, state.scratch_page * page_size)
    tokens = torch.where(counts_in, tokens, 0).long()
    return StepInputs(
        tokens=tokens,
        positions=places.long(),
        slots=slots.long(),
        seats=seat,
        starts=starts,
        contexts=computed,
        lengths=total,
        drafted=Drafted(
            tokens=tokens,
            starts=starts[:-1] + scheduled - 1,
            counts=torch.where(produces, drafted + 1, 0).int(),
            scheduled=runs,
            seats=seats,
        ),
    )


def _at(table: Tensor, seats: Tensor, places: Tensor) -> Tensor:
    """An entry of each seat's row, [N]; places: int [N], never below 0."""
    return table[seats, places.clamp(max=table.shape[1] - 1)]
