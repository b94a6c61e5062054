"""Attention for steps of a fixed shape in plain PyTorch: the reference on every device, and the CPU backend."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import FixedAttention, RaggedRows, StepShape
from engine.models.self_attention import Attend


class PlainFixed(FixedAttention):
    """Gathers keys up to the largest possible length for every sequence and masks those beyond its own length."""

    def __init__(self, keys: Tensor, values: Tensor | None, shape: StepShape, first_slot: int = 0) -> None:
        """keys, values: the cache, [layers, pages, page size, kv_heads, head_dim] each; values are None if they are the
        first components of keys. first_slot: see `make_attention`.
        """
        self._keys = keys
        self._values = values
        self._shape = shape
        self._first_slot = first_slot
        self._pages = 0

    def plan(self, contexts: np.ndarray, rows: np.ndarray) -> None:  # noqa: ARG002  # the device has them
        """See `FixedAttention.plan`."""
        self._pages = -(-(int(contexts.max()) + self._shape.width) // self._keys.shape[2])

    def begin(self, rows: RaggedRows) -> Attend:
        """See `FixedAttention.begin`."""
        batch, count, width, _ = self._shape
        pages = rows.page_tables[:, : self._pages].long()
        key_positions = torch.arange(pages.shape[1] * self._keys.shape[2], device=pages.device)
        positions = rows.contexts[:, None] + torch.arange(width, device=pages.device)
        mask = ((key_positions <= positions[:, :, None]) & (key_positions >= self._first_slot))[:, None]
        # Index of each row in a padded [sequence, row] grid; padding rows after the last sequence share one extra cell.
        row = torch.arange(count, device=pages.device, dtype=torch.int32)
        owner = torch.searchsorted(rows.starts[1:], row, right=True)
        cell = torch.where(owner < batch, owner * width + row - rows.starts[owner], batch * width)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys = self._keys[layer]
            keys.flatten(0, 1).index_copy_(0, rows.slots, key)
            values = keys  # for latent attention; see `PlainAttention`
            if self._values is not None:
                values = self._values[layer]
                values.flatten(0, 1).index_copy_(0, rows.slots, value)
            queries = query.new_zeros(batch * width + 1, *query.shape[1:]).index_copy(0, cell, query)
            queries = queries[:-1].unflatten(0, (batch, width)).transpose(1, 2)
            all_keys, all_values = (cached[pages].flatten(1, 2).transpose(1, 2) for cached in (keys, values))
            attended = F.scaled_dot_product_attention(queries, all_keys, all_values, mask, enable_gqa=True)
            attended = attended[..., : value.shape[-1]]
            return F.pad(attended.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1))[cell]

        return attend
