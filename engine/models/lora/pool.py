"""The LoRA adapters of a served model: layers with the updates of several adapters, and which adapters are in memory.

The rows of a step are grouped by adapter. Groups of few rows run in one batched product over the adapters; a larger
group runs in a product of its own. Rows without an adapter are not touched. At most a fixed number of adapters is in
memory. An adapter is read in another thread while steps run, and takes the place of the least recently used one that no
running sequence uses.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
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
LOG = logging.getLogger(__name__)
Loading = Future[dict[str, Update]]


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
            down = self._down[slot, :, columns]
            down.zero_()
            up[slot].zero_()
            if name in updates:
                given = updates[name]
                rank = given.down.shape[1]
                down[:, :rank] = given.down
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
    """Adapters of one decoder. Use it from the thread that runs the engine."""

    def __init__(self, model: Decoder, adapters: Mapping[str, Adapter], size: int) -> None:
        """Replace the linear layers of `model` that an adapter changes.

        adapters: as returned by `check_adapters`. size: largest number of adapters in memory.
        """
        self._adapters = adapters
        self._step = StepRows()
        self._device = model.embedding.weight.device
        count = min(size, len(adapters))
        self._layers = _attach(model, adapters, count, self._step)
        self._free = list(range(count))
        """Slots that hold no adapter."""
        self._slots: OrderedDict[str, int] = OrderedDict()
        """Slots of the adapters in memory, by name, the least recently used first."""
        self._loading: dict[str, tuple[int, Loading]] = {}
        """Slots of the adapters that are being read."""
        self._failed: dict[str, Exception] = {}
        """Errors of adapters that could not be read, until `prepare` raises them."""
        self._users: Counter[str] = Counter()
        """Number of running sequences by adapter."""
        self._reader = ThreadPoolExecutor(1, "lora")

    @property
    def names(self) -> Collection[str]:
        """Names that requests may choose."""
        return self._adapters.keys()

    @property
    def loaded(self) -> list[str]:
        """Names of the adapters in memory, the least recently used first."""
        return list(self._slots)

    def prepare(self, name: str, waiting: Collection[str] = ()) -> bool:
        """Return whether one more sequence of an adapter may run now; if possible, begin to read one not in memory.

        waiting: other adapters for which older sequences wait. To bound the wait, the least recently used adapters
        accept no further sequences: one adapter for each in `waiting` without a slot. Raises UserError for an
        adapter that cannot be read; the next call for it reads it again.
        """
        self._store_finished()
        without_slot = sum(each not in self._slots and each not in self._loading for each in waiting)
        if not without_slot and name not in self._slots and name not in self._failed:
            self._begin_reading(name)
            self._store_finished()
        if (problem := self._failed.pop(name, None)) is not None:
            LOG.warning("the adapter %s cannot be read: %s", name, problem)
            raise UserError(f"the adapter {name} cannot be read; see the engine's log")
        return name in self._slots and name not in islice(self._slots, without_slot)

    def wait(self) -> None:
        """Wait until no adapter is being read."""
        self._store_finished(wait=True)

    def acquire(self, name: str) -> None:
        """Count one more running sequence of an adapter in memory."""
        self._slots.move_to_end(name)
        self._users[name] += 1

    def release(self, name: str) -> None:
        """Count one running sequence of an adapter less."""
        self._users[name] -= 1

    def applied_to(self, batch: Batch) -> AbstractContextManager[None]:
        """Return a context in which the model runs a batch, each sequence with its adapter, which must be in memory."""
        if not any(batch.adapters):
            return self._step.set_to(None)
        slots = [-1 if name is None else self._slots[name] for name in batch.adapters]
        rows = np.repeat(slots, batch.lengths)
        return self._step.set_to(RowGroups.of(rows, self._device))

    def close(self) -> None:
        """Stop the thread that reads adapters."""
        self._reader.shutdown(cancel_futures=True)

    def _begin_reading(self, name: str) -> None:
        """Begin to read an adapter, if a slot is free or holds an adapter that no running sequence uses."""
        if name in self._loading:
            return
        if not self._free:
            unused = next((each for each in self._slots if not self._users[each]), None)
            if unused is None:
                return
            self._free.append(self._slots.pop(unused))
        self._loading[name] = self._free.pop(0), self._reader.submit(self._adapters[name].read)

    @torch.inference_mode()
    def _store_finished(self, *, wait: bool = False) -> None:
        """Copy adapters that were read to their slots; no step runs meanwhile."""
        for name, (slot, reading) in list(self._loading.items()):
            if wait or reading.done():
                del self._loading[name]
                self._free.append(slot)  # stays free if reading failed
                try:
                    updates = reading.result()
                except Exception as problem:
                    # A damaged file may raise anything, and must end the requests of its adapter only.
                    self._failed[name] = problem
                    continue
                for layer in self._layers:
                    layer.store(slot, updates)
                self._free.remove(slot)
                self._slots[name] = slot


def _attach(model: Decoder, adapters: Mapping[str, Adapter], slots: int, step: StepRows) -> list[LoraLinear]:
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
            layer = LoraLinear(base, inputs, parts, slots, like, step)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, layer)
            attached.append(layer)
    return attached
