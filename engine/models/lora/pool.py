"""The adapters of a served model, all of them in memory, and which one each row of a step uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np

from engine.models.decoder import Decoder
from engine.models.lora.format import Adapter, Place
from engine.models.lora.linear import LoraLinear, Part, RowGroups, StepRows

if TYPE_CHECKING:
    from engine.executor.batch import Span


class AdapterPool:
    """Adapters of one decoder."""

    def __init__(self, model: Decoder, adapters: Mapping[str, Adapter]) -> None:
        """Read the adapters, and replace the linear layers of `model` that one of them changes.

        adapters: as returned by `check_adapters`. Raises UserError for weights that are not finite.
        """
        self._slots = {name: slot for slot, name in enumerate(adapters)}
        self._step = StepRows()
        self._device = model.embedding.weight.device
        layers = _attach(model, adapters, self._step)
        for name, adapter in adapters.items():
            updates = adapter.read()
            for layer in layers:
                layer.store(self._slots[name], updates)

    @property
    def names(self) -> Collection[str]:
        """Names that requests may choose."""
        return self._slots.keys()

    def applied_to(self, spans: Sequence[Span]) -> AbstractContextManager[None]:
        """Return a context in which the model runs a batch of spans, each with its adapter."""
        if not any(span.adapter for span in spans):
            return self._step.set_to(None)
        slots = [-1 if span.adapter is None else self._slots[span.adapter] for span in spans]
        rows = np.repeat(slots, [span.length for span in spans])
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
