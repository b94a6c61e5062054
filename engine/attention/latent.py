"""Plain backend for latent attention: prompts in the expanded form, other rows in the absorbed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from engine.attention.plain import PlainAttention
from engine.executor.batch import Batch, Span
from engine.models.config import LatentConfig
from engine.models.latent_attention import Expansion
from engine.models.self_attention import Attend


def is_prompt(span: Span, latent: LatentConfig) -> bool:
    """Return whether a span's attention takes fewer operations in the expanded form than in the absorbed one.

    Expanding takes latent * (nope + value) operations for each entry and head. Each query then saves
    2 * latent - nope - value operations for each entry and head.
    """
    size = latent.nope_dim + latent.value_dim
    return span.tree is None and span.length * (2 * latent.latent_dim - size) > latent.latent_dim * size


class LatentPlainAttention(PlainAttention):
    """`PlainAttention` over latents, which runs prompts in the expanded form."""

    def begin(self, batch: Batch) -> Attend:
        """See `Attention.begin`."""
        assert self.config.latent is not None
        prompts = [span for span in batch.spans if is_prompt(span, self.config.latent)]
        if not prompts:
            return super().begin(batch)
        others = [span for span in batch.spans if span not in prompts]
        starts = np.cumsum([0, *(span.length for span in others)]).tolist()
        moved = [span._replace(start=start) for span, start in zip(others, starts, strict=False)]
        rest = super().begin(replace(batch, slots=batch.slots[_rows(others)], spans=moved)) if others else None
        return PromptAttend(self, batch, prompts, others, rest)

    def entries(self, layer: int, pages: Tensor, first: int, end: int) -> Tensor:
        """Return the entries of a sequence from slot `first` to `end`, [end - first, latent + head_dim]."""
        return self._keys[layer][pages].flatten(0, 2)[first:end]


class PromptAttend:
    """Attention of one step with prompts; see `LatentAttend`. Called as `Attend`, it runs the other rows."""

    def __init__(
        self,
        attention: LatentPlainAttention,
        batch: Batch,
        prompts: Sequence[Span],
        others: Sequence[Span],
        rest: Attend | None,
    ) -> None:
        """prompts: spans of the batch to expand. others: those that `rest` runs, None if there are none."""
        self._attention = attention
        self._rest = rest
        self._rest_rows = attention.on_device(_rows(others))
        rows = _rows(prompts)
        self._prompt_rows, self._slots = attention.on_device(rows), attention.on_device(batch.slots[rows])
        self._prompts = [(span, attention.on_device(np.array(span.pages))) for span in prompts]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Run the rows outside of prompts in the absorbed form."""
        assert self._rest is not None
        return self._rest(layer, query, key, value)

    def attend_latent(self, layer: int, query: Tensor, entries: Tensor, expansion: Expansion) -> Tensor:
        """See `LatentAttend.attend_latent`."""
        self._attention.store(layer, self._slots, entries[self._prompt_rows, None])
        attended = query.new_empty(*query.shape[:2], expansion.value_dim)
        if self._rest is not None:
            others = self._rest_rows
            attended[others] = expansion.absorbed(layer, query[others], entries[others], self)
        for span, pages in self._prompts:
            first, end = self._attention.first_slot, span.computed + span.length
            cached = self._attention.entries(layer, pages, first, end)
            rows = slice(span.start, span.start + span.length)
            attended[rows] = expansion.expanded(query[rows], cached)
        return attended


def _rows(spans: Sequence[Span]) -> np.ndarray:
    """Return the rows of spans within their batch, int64."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(span.length) + span.start for span in spans)])
