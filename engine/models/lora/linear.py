"""Linear layers with the updates of several LoRA adapters, chosen per row.

The rows of a step are grouped by adapter. Groups of few rows run in one batched product over the adapters; a larger
group runs in a product of its own. Rows without an adapter are not touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine.executor.transfer import on_device
from engine.models.lora.format import LayerShape

LARGEST_BATCHED = 32
"""Number of rows up to which a group runs in the batched product, which pads all groups to the largest one."""
LEAST_ROWS = 4
"""Number of rows to which smaller products are padded. CPU libraries have other kernels for fewer rows, which sum in
another order; with this many, an update's bits do not depend on the number of rows."""


class BatchedRows(NamedTuple):
    """Groups that run in one batched product."""

    gathered: Tensor
    """int64 [adapters, M]: rows of each group; unused places have any row."""
    rows: Tensor
    """int64 [n]: rows of all groups."""
    places: Tensor
    """int64 [n]: index of each row in the flattened `gathered`."""


class OwnRows(NamedTuple):
    """A group that runs in a product of its own."""

    slot: int
    gathered: Tensor
    """int64 [M]: rows of the group; unused places at the end have any row."""
    rows: Tensor
    """int64 [n]."""


class RowGroups(NamedTuple):
    """The rows of a step that use an adapter."""

    batched: BatchedRows | None
    own: list[OwnRows]

    @classmethod
    def of(cls, slots: np.ndarray, device: torch.device) -> RowGroups:
        """Group the rows of a step. slots: int64 [N], slot of each row's adapter; -1 for a row without one."""
        groups = {slot: np.flatnonzero(slots == slot) for slot in np.unique(slots).tolist() if slot >= 0}
        small = {slot: rows for slot, rows in groups.items() if len(rows) <= LARGEST_BATCHED}
        if len(small) == 1:
            small = {}
        own = [
            OwnRows(slot, on_device(_padded(rows, LEAST_ROWS), device), on_device(rows, device))
            for slot, rows in groups.items()
            if slot not in small
        ]
        return cls(_batched(small, device) if small else None, own)


def _batched(groups: Mapping[int, np.ndarray], device: torch.device) -> BatchedRows:
    width = max(LEAST_ROWS, *(len(rows) for rows in groups.values()))
    gathered = np.zeros((max(groups) + 1, width), np.int64)
    for slot, rows in groups.items():
        gathered[slot] = _padded(rows, width)
    places = np.concatenate([slot * width + np.arange(len(rows)) for slot, rows in groups.items()])
    return BatchedRows(*(on_device(each, device) for each in (gathered, np.concatenate([*groups.values()]), places)))


def _padded(rows: np.ndarray, least: int) -> np.ndarray:
    return np.concatenate((rows, np.zeros(max(0, least - len(rows)), np.int64)))


class StepRows:
    """The groups of the step that runs now, shared by all layers of a decoder."""

    def __init__(self) -> None:
        self.groups: RowGroups | None = None

    @contextmanager
    def set_to(self, groups: RowGroups | None) -> Iterator[None]:
        """Apply `groups` to forward passes in this context."""
        self.groups = groups
        try:
            yield
        finally:
            self.groups = None


class LoraLinear(nn.Module):
    """A linear layer with room for the updates of several adapters."""

    down: Tensor
    """[slots, inputs, rank]; zero beyond an adapter's own rank."""
    up: Tensor
    """[slots, rank, outputs]."""

    def __init__(self, base: nn.Module, shape: LayerShape, slots: int, like: Tensor, step: StepRows) -> None:
        """base: the layer without adapters. shape: with the largest rank. like: has the dtype and device."""
        super().__init__()
        self.base = base
        self._step = step
        self.register_buffer("down", like.new_zeros(slots, shape.inputs, shape.rank))
        self.register_buffer("up", like.new_zeros(slots, shape.rank, shape.outputs))

    def store(self, slot: int, update: tuple[Tensor, Tensor] | None) -> None:
        """Store an adapter's update, [inputs, r] and [r, outputs] as of `Adapter.read`; None: it has none."""
        for stored, given in zip((self.down[slot], self.up[slot]), update or (), strict=False):
            stored.zero_()
            stored[: given.shape[0], : given.shape[1]] = given
        if update is None:
            self.up[slot].zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [N, inputs] to [N, outputs]."""
        out: Tensor = self.base(hidden)
        groups = self._step.groups
        if groups is None:
            return out
        if groups.batched is not None:
            gathered, rows, places = groups.batched
            count = len(gathered)
            update = torch.bmm(torch.bmm(hidden[gathered], self.down[:count]), self.up[:count])
            out.index_add_(0, rows, update.flatten(0, 1)[places])
        for slot, gathered, rows in groups.own:
            update = torch.mm(torch.mm(hidden[gathered], self.down[slot]), self.up[slot])
            out.index_add_(0, rows, update[: len(rows)])
        return out
