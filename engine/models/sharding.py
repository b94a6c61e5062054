"""A decoder that is divided over ranks, the exchange of its parts, and loading them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.division import Shard, check_division, part_config, part_slices
from engine.models.loader import (
    allocate,
    checkpoint_views,
    is_redundant_in,
    load_config,
    model_checkpoint,
    on_meta_device,
    shapes,
)
from engine.models.quantized.linear import keep_quantized

SUMMED = ("attention.o_proj", "feed_forward")
"""Modules of a layer whose outputs are summed over ranks."""
OUTPUT_BIASES = ("attention.o_proj.bias", "feed_forward.down_proj.bias")
"""Biases of the last projections before a sum over ranks."""


class Group(Protocol):
    """Operations that all ranks of a group call in the same order."""

    shard: Shard

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors of one shape; may overwrite the input. The order of summation does not
        depend on the shape."""
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, of one shape, on rank 0; nothing on the others."""
        ...


class ShardedDecoder(Decoder):
    """One part of a decoder. It runs when all ranks run theirs; `logits` returns all logits on rank 0 alone."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        """config: shape of the undivided model."""
        super().__init__(part_config(config, shard))
        self.part = self.config
        """Shape of this part."""
        self.group: Group | None = None

    def connect(self, config: ModelConfig, group: Group) -> None:
        """Add the exchange with other ranks to the loaded weights. config: shape of the undivided model."""
        self.config = config
        self.group = group
        tokens = group.shard.tokens(config.vocab_size)
        replaced: dict[str, nn.Module] = {
            "lm_head": GatheredLinear(self.lm_head, config.vocab_size, group),
            "embedding": ShardedEmbedding(self.embedding.weight, tokens.start, group),
        }
        for name, module in replaced.items():
            self.set_submodule(name, module)
        for index in range(len(self.layers)):
            for name in SUMMED:
                module = self.get_submodule(f"layers.{index}.{name}")
                module.register_forward_hook(lambda _module, _inputs, output: group.sum(output))


def load_shard(
    folder: Path, shard: Shard, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> ShardedDecoder:
    """Return a part of the model in `folder`, without its connection to other ranks. Reads only the part's weights.

    Raises UserError for a missing or damaged file, for a config that does not match the weights, and for a model that
    cannot be divided.
    """
    config = load_config(folder)
    check_division(config, shard.count)
    checkpoint = model_checkpoint(folder)
    whole = shapes(checkpoint_views(on_meta_device(lambda: Decoder(config))))
    checkpoint.check(whole, is_redundant=is_redundant_in(folder, config))
    decoder = on_meta_device(lambda: ShardedDecoder(config, shard)).to(dtype)
    parts = shapes(checkpoint_views(decoder))
    if torch.device(device).type == "cpu":
        keep_quantized(decoder, whole, checkpoint.scheme)
    allocate(decoder, device)
    checkpoint.copy_into(checkpoint_views(decoder), lambda name: part_slices(name, whole[name], parts[name], shard))
    if shard.rank > 0:
        _clear_output_biases(decoder)
    return decoder.eval().requires_grad_(False)


def load_vocabulary(folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """Return a decoder without layers: the undivided embedding, norm and output projection of the model in `folder`."""
    config = load_config(folder)
    checkpoint = model_checkpoint(folder)
    decoder = on_meta_device(lambda: Decoder(config))
    decoder.layers = nn.ModuleList()
    checkpoint.check(shapes(checkpoint_views(decoder)), is_redundant=lambda _: True)
    allocate(decoder.to(dtype), device)
    checkpoint.copy_into(checkpoint_views(decoder))
    return decoder.eval().requires_grad_(False)


def _clear_output_biases(decoder: Decoder) -> None:
    """Set the biases of projections whose outputs are summed to zero, since rank 0 adds them."""
    for name, parameter in decoder.named_parameters():
        if name.endswith(OUTPUT_BIASES):
            parameter.detach().zero_()


class ShardedEmbedding(nn.Module):
    """Embeddings of some tokens; those of all tokens by summing over ranks."""

    def __init__(self, weight: Tensor, first: int, group: Group) -> None:
        """weight: of this rank's tokens, which begin with `first`."""
        super().__init__()
        self.weight = weight
        self._first = first
        self._group = group

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids [N] to embeddings [N, hidden_size]."""
        own = tokens - self._first
        is_absent = (own < 0) | (own >= len(self.weight))
        found = F.embedding(own.masked_fill(is_absent, 0), self.weight)
        return self._group.sum(found.masked_fill(is_absent[:, None], 0))


class GatheredLinear(nn.Module):
    """A linear layer for some output channels; rank 0 gathers those of all ranks."""

    def __init__(self, linear: nn.Module, channels: int, group: Group) -> None:
        """channels: number of output channels of all ranks."""
        super().__init__()
        self.linear = linear
        self._group = group
        self._sizes = [len(Shard(rank, group.shard.count).tokens(channels)) for rank in range(group.shard.count)]

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [M, in] to [M, out]: on rank 0 the output of all ranks, on others their own."""
        own: Tensor = self.linear(hidden)
        padded = F.pad(own, (0, max(self._sizes) - own.shape[1]))
        parts = self._group.gather(padded)
        if not parts:
            return own
        return torch.cat([part[:, :size] for part, size in zip(parts, self._sizes, strict=True)], dim=1)
