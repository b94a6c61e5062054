"""Plain backend for latent attention: prompts in the expanded form, other rows in the absorbed one."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from engine.attention.plain import PlainAttention
from engine.executor.batch import Batch
from engine.models.config import LatentConfig
from engine.models.latent_attention import Expansion
from engine.models.self_attention import Attend


def are_prompts(batch: Batch, latent: LatentConfig) -> np.ndarray:
    """Return for which sequences attention takes fewer operations in the expanded form than in the absorbed one.

    Expanding takes latent * (nope + value) operations for each entry and head. Each query then saves
    2 * latent - nope - value operations for each entry and head. The result is bool [B].
    """
    size = latent.nope_dim + latent.value_dim
    are_long = batch.lengths * (2 * latent.latent_dim - size) > latent.latent_dim * size
    return are_long & (np.diff(batch.nodes) == 0)


class LatentPlainAttention(PlainAttention):
    """`PlainAttention` over latents, which runs prompts in the expanded form."""

    def begin(self, batch: Batch) -> Attend:
        """See `Attention.begin`."""
        assert self.config.latent is not None
        is_prompt = are_prompts(batch, self.config.latent)
        if not is_prompt.any():
            return super().begin(batch)
        prompts, others = np.flatnonzero(is_prompt), np.flatnonzero(~is_prompt)
        rest = super().begin(batch.take(others)) if len(others) else None
        return PromptAttend(self, batch, prompts, others, rest)

    def pages_of(self, batch: Batch, index: int, end: int) -> Tensor:
        """Return the pages of the first `end` entries of a sequence, int64."""
        return self.on_device(batch.pages[index, : -(-end // self._page_size)].astype(np.int64))

    def entries(self, layer: int, pages: Tensor, first: int, end: int) -> Tensor:
        """Return the entries of a sequence from slot `first` to `end`, [end - first, latent + head_dim]."""
        return self._keys[layer][pages].flatten(0, 2)[first:end]


class PromptAttend:
    """Attention of one step with prompts; see `LatentAttend`. Called as `Attend`, it runs the other rows."""

    def __init__(
        self,
        attention: LatentPlainAttention,
        batch: Batch,
        prompts: np.ndarray,
        others: np.ndarray,
        rest: Attend | None,
    ) -> None:
        """prompts: int64, indices of sequences of the batch to expand. others: those that `rest` runs, None if there
        are none.
        """
        self._attention = attention
        self._rest = rest
        self._rest_rows = attention.on_device(batch.rows_of(others))
        rows = batch.rows_of(prompts)
        self._prompt_rows, self._slots = attention.on_device(rows), attention.on_device(batch.slots[rows])
        self._prompts = [self._span_of(batch, index) for index in prompts.tolist()]

    def _span_of(self, batch: Batch, index: int) -> tuple[slice, int, Tensor]:
        """Return the rows of a sequence, its number of tokens after them, and its pages."""
        rows, end = slice(*batch.starts[index : index + 2].tolist()), int(batch.computed[index] + batch.lengths[index])
        return rows, end, self._attention.pages_of(batch, index, end)

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
        for rows, end, pages in self._prompts:
            cached = self._attention.entries(layer, pages, self._attention.first_slot, end)
            attended[rows] = expansion.expanded(query[rows], cached)
        return attended
