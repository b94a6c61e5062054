"""The adapters of a served model: which are in memory, and which one each row of a step uses.

At most a fixed number is in memory. An adapter is read in another thread while steps run, and takes the place of the
least recently used one that no running sequence uses.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.models.decoder import Decoder
from engine.models.lora.format import Adapter, Place, Update
from engine.models.lora.linear import LoraLinear, Part, RowGroups, StepRows
from ssd.errors import UserError

if TYPE_CHECKING:
    from engine.executor.batch import Batch

LOG = logging.getLogger(__name__)
Loading = Future[dict[str, Update]]


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
