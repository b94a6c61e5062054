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
from engine.models.ops import Ops, Rotation
from engine.models.self_attention import Attend, RMSNorm

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

    def expanded(self, query: Tensor, entries: Tensor, mask: Tensor) -> Tensor:
        """Attend to expanded entries.

        query [Q, heads, nope_dim + head_dim], entries [K, latent_dim + head_dim] -> [Q, heads, value_dim].
        mask: bool [Q, K], the entries that each query attends to.
        """
        nope, latent = self._config.nope_dim, self._config.latent_dim
        heads = len(self._weight)
        projected = nn.functional.linear(entries[:, :latent], self._weight.flatten(0, 1)).unflatten(1, (heads, -1))
        rotated = entries[:, None, latent:].expand(-1, heads, -1)
        keys = torch.cat((projected[..., :nope], rotated), dim=-1)
        attended = nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            projected[..., nope:].transpose(0, 1)[None],
            mask,
            scale=self._config.scale(query.shape[-1]),
        )
        return attended[0].transpose(0, 1)


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
            query = self.query_proj(self.query_norm.normalise_sum(query.contiguous(), None, ops)[1])
        latents = self.latent_norm.normalise_sum(latents.contiguous(), None, ops)[1]
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
