"""Attention of a fixed shape in plain PyTorch: the reference, and what runs on CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.fixed import FixedAttention, Grid
from engine.models.decoder import Attend


class PlainFixed(FixedAttention):
    """Gathers as many keys for every sequence as the longest may have, and masks those that it has not."""

    def __init__(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        """keys, values: of the cache, [layers, pages, page size, kv_heads, d]. tokens: of each sequence."""
        self._keys = keys
        self._values = values
        self._tokens = tokens
        self._pages = 0

    def plan(self, tables: Sequence[list[int]], contexts: Sequence[int]) -> None:  # noqa: ARG002  # the device has them
        """See `FixedAttention.plan`."""
        self._pages = -(-(max(contexts) + self._tokens) // self._keys.shape[2])

    def begin(self, grid: Grid) -> Attend:
        """See `FixedAttention.begin`."""
        pages = grid.page_tables[:, : self._pages].long()
        key_places = torch.arange(pages.shape[1] * self._keys.shape[2], device=pages.device)
        places = grid.contexts[:, None] + torch.arange(self._tokens, device=pages.device)
        mask = (key_places <= places[:, :, None])[:, None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            keys.flatten(0, 1).index_copy_(0, grid.slots, key)
            values.flatten(0, 1).index_copy_(0, grid.slots, value)
            queries = query.view(len(pages), self._tokens, *query.shape[1:]).transpose(1, 2)
            key, value = (cached[pages].flatten(1, 2).transpose(1, 2) for cached in (keys, values))
            attended = F.scaled_dot_product_attention(queries, key, value, mask, enable_gqa=True)
            return attended.transpose(1, 2).reshape(query.shape)

        return attend
