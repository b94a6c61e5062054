"""The LoRA adapters of a served model: layers with the updates of several adapters.

The rows of a step are grouped by adapter. Groups of few rows run in one batched product over the adapters; a larger
group runs in a product of its own. Rows without an adapter are not touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
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


class Group(NamedTuple):
    """Rows of a step that run in one product: those of one adapter, or of several in a batched product."""

    slots: int | slice
    """Slots of the adapters."""
    gathered: Tensor
    """int64 [M], or [adapters, M]: rows of each adapter; unused places have any row."""
    rows: Tensor
    """int64 [n]: rows of all adapters."""
    places: Tensor | slice
    """int64 [n]: index of each row in the flattened `gathered`."""


def group_rows(slots: np.ndarray, device: torch.device) -> list[Group]:
    """Group the rows of a step that use an adapter. slots: int64 [N], slot of each row's adapter; -1 for none."""
    own = {slot: np.flatnonzero(slots == slot) for slot in np.unique(slots).tolist() if slot >= 0}
    small = {slot: rows for slot, rows in own.items() if len(rows) <= LARGEST_BATCHED}
    # The batched product also runs for unused slots; in a product of its own, an adapter takes about twice as long.
    if small and 2 * len(small) <= max(small) + 1:
        small = {}
    groups = [
        Group(slot, on_device(_padded(rows, LEAST_ROWS), device), on_device(rows, device), slice(len(rows)))
        for slot, rows in own.items()
        if slot not in small
    ]
    if small:
        width = max(LEAST_ROWS, *(len(rows) for rows in small.values()))
        gathered = np.zeros((max(small) + 1, width), np.int64)
        for slot, rows in small.items():
            gathered[slot] = _padded(rows, width)
        places = np.concatenate([slot * width + np.arange(len(rows)) for slot, rows in small.items()])
        arrays = (on_device(each, device) for each in (gathered, np.concatenate([*small.values()]), places))
        groups.append(Group(slice(len(gathered)), *arrays))
    return groups


def _padded(rows: np.ndarray, least: int) -> np.ndarray:
    return np.concatenate((rows, np.zeros(max(0, least - len(rows)), np.int64)))


class LoraLinear(nn.Module):
    """A linear layer with room for the updates of several adapters."""

    def __init__(self, base: nn.Module, places: Mapping[str, Place], pool: AdapterPool, like: Tensor) -> None:
        """base: the layer without adapters. places: the modules that it concatenates, by name.

        like: a tensor of the dtype and device of the updates.
        """
        super().__init__()
        self.base = base
        self._pool = pool
        self._names = list(places)
        ranks = [pool.ranks[name] for name in places]
        slots, inputs = len(pool.names), next(iter(places.values())).inputs
        self._down = like.new_zeros(slots, inputs, sum(ranks))
        """[slots, inputs, ranks of all parts]; zero beyond an adapter's own ranks."""
        self._up = [like.new_zeros(slots, rank, each.rows) for rank, each in zip(ranks, places.values(), strict=True)]
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
        for slots, gathered, rows, places in self._pool.groups:
            inner = hidden[gathered] @ self._down[slots]
            parts = [inner[..., columns] @ up[slots] for columns, up in zip(self._columns, self._up, strict=True)]
            update = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            out.index_add_(0, rows, update.view(-1, out.shape[1])[places])
        return out


class AdapterPool:
    """Adapters of one decoder, which are all in memory."""

    def __init__(self, model: Decoder, adapters: Mapping[str, Adapter]) -> None:
        """Read the adapters, and replace the linear layers of `model` that they change.

        adapters: as returned by `check_adapters`. Raises UserError for values that are not finite.
        """
        self.groups: list[Group] = []
        """Rows of the step that runs now."""
        self.ranks: Counter[str] = Counter()
        """Largest rank of each module among the adapters."""
        self._device = model.embedding.weight.device
        self._slots = {name: slot for slot, name in enumerate(adapters)}
        for adapter in adapters.values():
            self.ranks |= Counter({module: rank for module, (_, rank, _) in adapter.modules.items()})
        layers = self._attach(model, next(iter(adapters.values())).places)
        for name, adapter in adapters.items():
            try:
                updates = adapter.read()
            except UserError as problem:
                raise UserError(f"--lora {name}: {problem}") from None
            for layer in layers:
                layer.store(self._slots[name], updates)

    def _attach(self, model: Decoder, places: Mapping[str, Place]) -> list[LoraLinear]:
        """Replace the linear layers of `model` that an adapter changes, and return the new ones."""
        layers: dict[str, dict[str, Place]] = {}
        for module, place in places.items():
            layers.setdefault(place.layer, {})[module] = place
        attached = []
        for name, own in layers.items():
            if any(self.ranks[module] for module in own):
                attached.append(LoraLinear(model.get_submodule(name), own, self, model.embedding.weight.detach()))
                model.set_submodule(name, attached[-1])
        return attached

    @property
    def names(self) -> Collection[str]:
        """Names that requests may choose."""
        return self._slots.keys()

    @contextmanager
    def applied_to(self, batch: Batch) -> Iterator[None]:
        """Run a batch in this context, each sequence with its adapter."""
        if any(batch.adapters):
            slots = [-1 if name is None else self._slots[name] for name in batch.adapters]
            self.groups = group_rows(np.repeat(slots, batch.lengths), self._device)
        try:
            yield
        finally:
            self.groups = []
