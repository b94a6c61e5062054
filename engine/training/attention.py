"""Attention over windows of text, and along chains of drafts that begin in them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class WindowAttention:
    """Causal attention within B windows of M rows; keeps keys and values, [B, kv_heads, M, head_dim] by layer."""

    def __init__(self, windows: int, rows: int) -> None:
        self._shape = (windows, rows)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attend`."""
        query, key, value = (x.view(*self._shape, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        self.keys[layer], self.values[layer] = key, value
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(0, 1)


class ChainAttention:
    """Attention of chains to the rows of a window up to their start, and to their own earlier steps."""

    def __init__(self, window: WindowAttention, starts: Tensor) -> None:
        """starts: int64 [B, C], rows of the window."""
        self._window = window
        self._shape = tuple(starts.shape)
        self._starts = starts
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute a layer for the next step of all chains, [B * C, heads, head_dim]; see `Attend`."""
        query, key, value = (x.view(*self._shape, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        own_keys = self._keys.setdefault(layer, [])
        own_values = self._values.setdefault(layer, [])
        own_keys.append(key)
        own_values.append(value)
        keys, values = self._window.keys[layer], self._window.values[layer]
        rows = keys.shape[2]
        # [B, kv_heads, group, C, head_dim]; the group shares a key head.
        grouped = query.unflatten(1, (keys.shape[1], -1)) * query.shape[-1] ** -0.5
        hidden = torch.arange(rows) > self._starts[:, None, None, :, None]
        scores = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).masked_fill(hidden, float("-inf"))
        own_scores = [(grouped * own.unsqueeze(2)).sum(-1, keepdim=True) for own in own_keys]
        weights = torch.cat((scores, *own_scores), dim=-1).softmax(dim=-1)
        attended = weights[..., :rows] @ values.unsqueeze(2)
        for step, own in enumerate(own_values):
            attended = attended + weights[..., rows + step, None] * own.unsqueeze(2)
        return attended.flatten(1, 2).transpose(1, 2).flatten(0, 1)
