"""The LoRA adapters of a served model: layers with the updates of several adapters.

The rows of a step are grouped by adapter. Groups of few rows run in one batched product over the adapters; a larger
group runs in a product of its own. Rows without an adapter are not touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine.executor.transfer import on_device
from engine.models.decoder import Decoder
from engine.models.lora.format import Adapter, Place, Update
from engine.models.packed import LEAST_ROWS
from ssd.errors import UserError

if TYPE_CHECKING:
    from engine.executor.batch import Batch

LARGEST_BATCHED = 32
"""Number of rows up to which a group runs in the batched product, which pads all groups to the largest one."""


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
        # The batched product also runs for unused slots; in a product of its own, an adapter takes about twice as long.
        if small and 2 * len(small) <= max(small) + 1:
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


class Part(NamedTuple):
    """Module of the checkpoint that is a part of a linear layer."""

    rows: int
    """Number of its outputs."""
    rank: int
    """Largest rank among the adapters; 0 if none changes it."""


class LoraLinear(nn.Module):
    """A linear layer with room for the updates of several adapters."""

    def __init__(
        self, base: nn.Module, inputs: int, parts: Mapping[str, Part], slots: int, like: Tensor, step: StepRows
    ) -> None:
        """base: the layer without adapters. parts: the modules that it concatenates, by name.

        like: a tensor of the dtype and device of the updates.
        """
        super().__init__()
        self.base = base
        self._step = step
        self._names = list(parts)
        ranks = [part.rank for part in parts.values()]
        self._down = like.new_zeros(slots, inputs, sum(ranks))
        """[slots, inputs, ranks of all parts]; zero beyond an adapter's own ranks."""
        self._up = [like.new_zeros(slots, rank, rows) for rows, rank in parts.values()]
        """[slots, rank, rows] of each part: a block-diagonal matrix for the whole layer would be mostly zeros."""
        ends = np.cumsum(ranks).tolist()
        self._columns = [slice(end - rank, end) for end, rank in zip(ends, ranks, strict=True)]
        """Columns of `_down` that belong to each part."""

    def store(self, slot: int, updates: Mapping[str, Update]) -> None:
        """Store an adapter's updates. Updates of modules of other layers are ignored."""
        for name, columns, up in zip(self._names, self._columns, self._up, strict=True):
            if name in updates:
                given = updates[name]
                rank = given.down.shape[1]
                self._down[slot, :, columns][:, :rank] = given.down
                up[slot, :rank] = given.up

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [N, inputs] to [N, outputs]."""
        out: Tensor = self.base(hidden)
        groups = self._step.groups
        if groups is None:
            return out
        if groups.batched is not None:
            gathered, rows, places = groups.batched
            update = self._update(hidden[gathered], slice(len(gathered)))
            out.index_add_(0, rows, update.flatten(0, 1)[places])
        for slot, gathered, rows in groups.own:
            out.index_add_(0, rows, self._update(hidden[gathered], slot)[: len(rows)])
        return out

    def _update(self, hidden: Tensor, slots: int | slice) -> Tensor:
        """Return the updates of one adapter, [M, outputs], or of several, [adapters, M, outputs].

        hidden: [M, inputs] or [adapters, M, inputs].
        """
        inner = hidden @ self._down[slots]
        parts = [inner[..., columns] @ up[slots] for columns, up in zip(self._columns, self._up, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class AdapterPool:
    """Adapters of one decoder, which are all in memory."""

    def __init__(self, model: Decoder, adapters: Mapping[str, Adapter]) -> None:
        """Read the adapters, and replace the linear layers of `model` that they change.

        adapters: as returned by `check_adapters`. Raises UserError for values that are not finite.
        """
        self._step = StepRows()
        self._device = model.embedding.weight.device
        self._slots = {name: slot for slot, name in enumerate(adapters)}
        layers = _attach(model, adapters, self._step)
        for name, adapter in adapters.items():
            try:
                updates = adapter.read()
            except UserError as problem:
                raise UserError(f"--lora {name}: {problem}") from None
            for layer in layers:
                layer.store(self._slots[name], updates)

    @property
    def names(self) -> Collection[str]:
        """Names that requests may choose."""
        return self._slots.keys()

    def applied_to(self, batch: Batch) -> AbstractContextManager[None]:
        """Return a context in which the model runs a batch, each sequence with its adapter."""
        if not any(batch.adapters):
            return self._step.set_to(None)
        slots = [-1 if name is None else self._slots[name] for name in batch.adapters]
        rows = np.repeat(slots, batch.lengths)
        return self._step.set_to(RowGroups.of(rows, self._device))


def _attach(model: Decoder, adapters: Mapping[str, Adapter], step: StepRows) -> list[LoraLinear]:
    """Replace the linear layers of `model` that an adapter changes, and return the new ones."""
    ranks: Counter[str] = Counter()
    places: Mapping[str, Place] = {}
    for adapter in adapters.values():
        ranks |= Counter({module: rank for module, (_, rank, _) in adapter.modules.items()})
        places = adapter.places
    layers: dict[str, dict[str, Part]] = {}
    for module, place in places.items():
        layers.setdefault(place.layer, {})[module] = Part(place.rows, ranks[module])
    attached = []
    for name, parts in layers.items():
        if any(part.rank for part in parts.values()):
            inputs = places[next(iter(parts))].inputs
            base, like = model.get_submodule(name), model.embedding.weight.detach()
            layer = LoraLinear(base, inputs, parts, len(adapters), like, step)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, layer)
            attached.append(layer)
    return attached
