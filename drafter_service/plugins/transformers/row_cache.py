"""The KV cache of a batch whose rows accept different numbers of draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MAX_HOLES = 0.125
"""Slots beyond the longest row, relative to its length, above which the cache is compacted. With 1000 tokens per row,
compacting takes a third of a step's time, and twice the slots take 1.7 times the time."""


class RowCache:
    """A rectangular KV cache. A mask hides the slots of rejected tokens and of padding.

    The slots of a row are in the order of its text, so the host's causal mask over slots is right. Positions cannot be
    derived from slots; each step must give them.
    """

    def __init__(self, cache: Any, rows: int) -> None:
        """cache: the host's `DynamicCache`, empty. rows: number of rows of the batch."""
        self._cache = cache
        self._rows = rows
        self._mask: Any = None
        """int64 [B, S]: 1 where a slot has a token of its row."""
        self._added = 0
        """Number of slots of the last step."""

    def extend(self, mask: Any) -> Any:
        """Add the slots of a step. mask: int64 [B, T], 1 where they have a token. Return the mask of all slots."""
        import torch

        self._added = mask.shape[1]
        self._mask = mask if self._mask is None else torch.cat((self._mask, mask), dim=1)
        return self._mask

    def keep(self, rows: Sequence[int], counts: Sequence[int], longest: int) -> None:
        """Keep some rows, and for each the first slots of the last step.

        rows: indices of rows, ascending. counts: number of slots of the last step to keep, for each of these rows.
        longest: number of tokens of the longest of them.
        """
        if len(rows) < self._rows:
            index = self._mask.new_tensor(rows)
            self._cache.batch_select_indices(index)
            self._mask, self._rows = self._mask[index], len(rows)
        unused = self._added - max(counts)
        if unused:
            self._cache.crop(-unused)
            self._mask = self._mask[:, :-unused]
        slots = self._mask.shape[1]
        for row, count in enumerate(counts):
            self._mask[row, slots - max(counts) + count :] = 0
        if slots > (1 + MAX_HOLES) * longest:
            self._compact(longest)

    def _compact(self, slots: int) -> None:
        """Reduce the cache to a number of slots, in which the tokens of each row are at the end."""
        order = self._mask.argsort(dim=1, stable=True)[:, -slots:]
        self._mask = self._mask.gather(1, order)
        rows = order.new_tensor(range(self._rows))[:, None]
        for layer in self._cache.layers:
            layer.keys = layer.keys.transpose(1, 2)[rows, order].transpose(1, 2)
            layer.values = layer.values.transpose(1, 2)[rows, order].transpose(1, 2)
