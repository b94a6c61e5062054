"""Multi-head latent attention: keys and values of all heads are projections of one cached vector per token.

DeepSeek-V2 (2024), section 2.1. A token's cache entry is its latent and one rotated key that all heads share. In the
absorbed form, queries are projected to the latent space and attend to the entries themselves, as one key head whose
values are the latents. In the expanded form, the keys and values of all heads are computed from the entries, which is
faster if many queries share them. Both give the same result up to rounding.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from engine.models.config import LatentConfig, ModelConfig
from engine.models.layers import Attend, Ops, RMSNorm, Rotation

WORKSPACE_BYTES = 256 << 20
"""Maximum number of bytes of keys, values and scores that the expanded form has in memory at a time."""
NORM_EPS = 1e-6
"""Epsilon of the norms within attention, for any value of `rms_norm_eps`."""


@runtime_checkable
class LatentAttend(Protocol):
    """Attention of one layer that runs some rows in the expanded form."""

    def attend_latent(self, layer: int, query: Tensor, entries: Tensor, expansion: Expansion) -> Tensor:
        """query [N, heads, nope_dim + head_dim], entries [N, latent_dim + head_dim] -> [N, heads, value_dim]."""
        ...


class Expansion:
    """Projections from latents to the keys and values of all heads, and the two forms of attention."""

    def __init__(self, weight: Tensor, config: LatentConfig) -> None:
        """weight: [heads, nope_dim + value_dim, latent_dim]."""
        self._weight = weight
        self._config = config
        self.value_dim = config.value_dim

    def absorbed(self, layer: int, query: Tensor, entries: Tensor, attend: Attend) -> Tensor:
        """Attend in the latent space; shapes as in `LatentAttend.attend_latent`."""
        nope, latent = self._config.nope_dim, self._config.latent_dim
        keys, values = self._weight[:, :nope], self._weight[:, nope:]
        projected = torch.bmm(query[..., :nope].transpose(0, 1), keys).transpose(0, 1)
        # Backends divide scores by the root of the query's size.
        scale = (query.shape[-1] - nope + latent) ** 0.5 * self._config.scale(query.shape[-1])
        absorbed = torch.cat((projected, query[..., nope:]), dim=-1) * scale
        attended = attend(layer, absorbed, entries[:, None], entries[:, None, :latent])
        return torch.bmm(attended.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)

    def expanded(self, query: Tensor, entries: Tensor) -> Tensor:
        """Attend to expanded entries. The last query attends to all of them, each earlier query to one fewer.

        query [Q, heads, nope_dim + head_dim], entries [K, latent_dim + head_dim] -> [Q, heads, value_dim].
        Heads and queries run in groups that need at most `WORKSPACE_BYTES`, or the bytes of one head's keys and values.
        """
        attended = query.new_empty(*query.shape[:2], self.value_dim)
        most = WORKSPACE_BYTES // query.itemsize
        # For each entry and head: the projection, and the key and value that are made from it.
        values = self._weight.shape[1] + 2 * query.shape[-1]
        heads = min(max(1, most // (values * len(entries))), query.shape[1])
        rows = max(1, most // (heads * len(entries)))
        for head in range(0, query.shape[1], heads):
            group = slice(head, head + heads)
            self._attend_heads(query[:, group], entries, group, rows, attended[:, group])
        return attended

    def _attend_heads(self, query: Tensor, entries: Tensor, group: slice, rows: int, attended: Tensor) -> None:
        """Write some heads of `expanded` to `attended` [Q, heads, value_dim]; `rows` queries run at a time."""
        keys, values = self._expand(entries, group)
        before = len(entries) - len(query)
        for first in range(0, len(query), rows):
            part = slice(first, min(first + rows, len(query)))
            end = before + part.stop
            visible = torch.arange(before + first, end, device=query.device)
            found = nn.functional.scaled_dot_product_attention(
                query[part].transpose(0, 1)[None],
                keys[None, :, :end],
                values[None, :, :end],
                torch.arange(end, device=query.device) <= visible[:, None],
                scale=self._config.scale(query.shape[-1]),
            )
            attended[part] = found[0, ..., : self.value_dim].transpose(0, 1)

    def _expand(self, entries: Tensor, group: slice) -> tuple[Tensor, Tensor]:
        """Return the keys and values of some heads, [heads, K, nope_dim + head_dim] each.

        Values are padded to the size of keys, because PyTorch has faster kernels for equal sizes.
        """
        nope, latent = self._config.nope_dim, self._config.latent_dim
        projected = torch.matmul(entries[:, :latent], self._weight[group].transpose(1, 2))
        rotated = entries[:, latent:].expand(len(projected), -1, -1)
        keys = torch.cat((projected[..., :nope], rotated), dim=-1)
        padding = max(0, keys.shape[-1] - self.value_dim)
        return keys, nn.functional.pad(projected[..., nope:], (0, padding))


class LatentAttention(nn.Module):
    """Multi-head latent attention of one layer."""

    def __init__(self, config: ModelConfig, latent: LatentConfig) -> None:
        super().__init__()
        self.heads, self.head_dim, self.latent = config.num_heads, config.head_dim, latent
        query_rows = self.heads * (latent.nope_dim + config.head_dim)
        self.down_rows = [latent.query_rank or query_rows, latent.latent_dim, config.head_dim]
        self.down_proj = nn.Linear(config.hidden_size, sum(self.down_rows), bias=False)
        self.query_norm = RMSNorm(latent.query_rank, NORM_EPS) if latent.query_rank else None
        self.query_proj = nn.Linear(latent.query_rank, query_rows, bias=False) if latent.query_rank else None
        self.latent_norm = RMSNorm(latent.latent_dim, NORM_EPS)
        self.expansion = nn.Parameter(torch.empty(self.heads, latent.nope_dim + latent.value_dim, latent.latent_dim))
        nn.init.normal_(self.expansion, std=latent.latent_dim**-0.5)
        self.o_proj = nn.Linear(self.heads * latent.value_dim, config.hidden_size, bias=False)

    def forward(self, layer: int, hidden: Tensor, ops: Ops, rotate: Rotation, attend: Attend) -> Tensor:
        """See `SelfAttention.forward`."""
        query, latents, key = self.down_proj(hidden).split(self.down_rows, dim=-1)
        if self.query_proj is not None:
            assert self.query_norm is not None
            query = self.query_proj(self.query_norm.normalize_sum(query.contiguous(), None, ops)[1])
        latents = self.latent_norm.normalize_sum(latents.contiguous(), None, ops)[1]
        query = query.unflatten(-1, (self.heads, -1))
        # The heads' rotated parts and the shared key are adjacent, so they are rotated together.
        rotated = rotate(self._pairs(torch.cat((query[..., self.latent.nope_dim :], key[:, None]), dim=1)))
        query = torch.cat((query[..., : self.latent.nope_dim], rotated[:, :-1]), dim=-1)
        entries = torch.cat((latents, rotated[:, -1]), dim=-1)
        expansion = Expansion(self.expansion, self.latent)
        if isinstance(attend, LatentAttend):
            attended = attend.attend_latent(layer, query, entries, expansion)
        else:
            attended = expansion.absorbed(layer, query, entries, attend)
        output: Tensor = self.o_proj(attended.flatten(1))
        return output

    def _pairs(self, heads: Tensor) -> Tensor:
        """Reorder the components of heads [N, H, head_dim] so that those rotated together are as in `rotate`."""
        if not self.latent.is_interleaved:
            return heads
        return heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
