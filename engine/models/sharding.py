"""Tensor parallelism (Shoeybi et al., Megatron-LM, 2019): the shape of each rank's part of a decoder, and running it.

Heads and the channels of feed-forward networks are divided, and a sum over all ranks follows each attention and each
feed-forward network. Each expert of a mixture is divided by channels too: every rank then reads the same number of
bytes, whichever experts the tokens of a step choose. Embedding and output projection are divided by tokens of the
vocabulary. Norms, routers, and the projections to latents are the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loader import (
    VOCABULARY,
    Shape,
    allocate,
    checkpoint_views,
    load_config,
    load_weights,
    model_checkpoint,
    on_meta_device,
    shapes,
)
from ssd.errors import UserError

SUMMED = ("attention.o_proj", "feed_forward")
"""Modules of a layer whose outputs are summed over ranks."""
OUTPUT_BIASES = ("attention.o_proj.bias", "feed_forward.down_proj.bias")
"""Biases of the last projections before a sum over ranks."""


@dataclass(frozen=True)
class Shard:
    """One of the parts that a model is divided into."""

    rank: int
    count: int

    def tokens(self, vocab_size: int) -> range:
        """Return the tokens whose rows of the embedding and the output projection this part has."""
        return range(vocab_size * self.rank // self.count, vocab_size * (self.rank + 1) // self.count)


def check_division(config: ModelConfig, count: int) -> None:
    """Raise UserError unless a model of this shape can be divided into `count` parts."""
    sizes = {"num_heads": config.num_heads}
    if config.experts is None or len(config.experts.layers) < config.num_layers:
        sizes["intermediate_size"] = config.intermediate_size
    if config.experts is not None:
        sizes["moe_intermediate_size"] = config.experts.intermediate_size
    for name, size in sizes.items():
        if size % count:
            raise UserError(f"--tensor-parallel {count} does not divide the model's {name}, {size}")
    if config.num_kv_heads % count and count % config.num_kv_heads:
        raise UserError(
            f"--tensor-parallel {count} neither divides the model's num_kv_heads, {config.num_kv_heads}, "
            "nor is a multiple of it"
        )
    if config.vocab_size < count:
        raise UserError(f"--tensor-parallel {count} is more than the model's vocab_size, {config.vocab_size}")


def part_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the shape of one part. If there are fewer key heads than parts, several parts have the same one."""
    experts = config.experts
    if experts is not None:
        experts = replace(
            experts,
            intermediate_size=experts.intermediate_size // shard.count,
            shared_size=experts.shared_size // shard.count,
        )
    return replace(
        config,
        vocab_size=len(shard.tokens(config.vocab_size)),
        num_heads=config.num_heads // shard.count,
        num_kv_heads=max(1, config.num_kv_heads // shard.count),
        intermediate_size=config.intermediate_size // shard.count,
        experts=experts,
        eos_token_ids=(),
    )


def part_slices(name: str, whole: Shape, part: Shape, shard: Shard) -> tuple[slice, ...]:
    """Return the indices of a part of a checkpoint's tensor. whole, part: shapes of the tensor and of its part.

    Dimensions of the same size are not divided. In the others, parts follow one another in the order of ranks; if the
    tensor has fewer parts than there are ranks, as with key heads, several successive ranks have the same one.
    """
    if name in VOCABULARY:  # The parts may differ by one token.
        tokens = shard.tokens(whole[0])
        return slice(tokens.start, tokens.stop), slice(0, whole[1])
    starts = [total * shard.rank // shard.count // size * size for total, size in zip(whole, part, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, part, strict=True))


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

    def part(name: str, whole: Shape, part: Shape) -> tuple[slice, ...]:
        return part_slices(name, whole, part, shard)

    decoder = load_weights(folder, config, lambda: ShardedDecoder(config, shard), dtype, device, part)
    if shard.rank > 0:
        _clear_output_biases(decoder)
    return decoder


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
