"""Divide a decoder over ranks (tensor parallelism; Shoeybi et al., Megatron-LM, 2019).

Query, key, value, gate and up projections are divided by rows, the projections behind them by columns, so that one sum
over all ranks follows attention and one the feed-forward network. Embedding and output projection are divided by
tokens of the vocabulary. Norms are the same on all ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loader import (
    allocate,
    checkpoint_views,
    is_redundant_in,
    load_config,
    model_checkpoint,
    on_meta_device,
    shapes,
)
from ssd.errors import UserError

QUERY, KEY_VALUE = ("self_attn.q_proj",), ("self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
OUTPUTS = {"self_attn.o_proj": "attention.o_proj", "mlp.down_proj": "feed_forward.down_proj"}
"""Projections that are divided by columns: their names in the layers of checkpoints and of the decoder."""
VOCABULARY = ("model.embed_tokens", "lm_head")


@dataclass(frozen=True)
class Shard:
    """One of the parts that a model is divided into."""

    rank: int
    count: int

    def tokens(self, vocab_size: int) -> range:
        """Return the tokens whose rows of the embedding and the output projection this part has."""
        return range(vocab_size * self.rank // self.count, vocab_size * (self.rank + 1) // self.count)


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


def check_division(config: ModelConfig, count: int) -> None:
    """Raise UserError unless a model of this shape can be divided into `count` parts. Reads no weights."""
    for part, found in (("experts", config.experts), ("latent attention", config.latent)):
        if found is not None:
            raise UserError(
                f"--tensor-parallel {count} cannot divide {part} yet, which {config.architecture} has; leave it out"
            )
    for name in ("num_heads", "intermediate_size"):
        if getattr(config, name) % count:
            raise UserError(f"--tensor-parallel {count} does not divide the model's {name}, {getattr(config, name)}")
    if config.num_kv_heads % count and count % config.num_kv_heads:
        raise UserError(
            f"--tensor-parallel {count} neither divides the model's num_kv_heads, {config.num_kv_heads}, "
            "nor is a multiple of it"
        )
    if config.vocab_size < count:
        raise UserError(f"--tensor-parallel {count} is more than the model's vocab_size, {config.vocab_size}")
    for name in whole_shapes(config):
        if _part(name, config, Shard(0, count)) is None:
            raise UserError(
                f"--tensor-parallel {count}: {config.architecture} has the tensor {name}, which cannot be divided yet; "
                "leave --tensor-parallel out"
            )


def whole_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of an undivided checkpoint by their names."""
    return shapes(checkpoint_views(on_meta_device(lambda: Decoder(config))))


def part_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the shape of one part. If there are fewer key heads than parts, several parts have the same one."""
    return replace(
        config,
        vocab_size=len(shard.tokens(config.vocab_size)),
        num_heads=config.num_heads // shard.count,
        num_kv_heads=max(1, config.num_kv_heads // shard.count),
        intermediate_size=config.intermediate_size // shard.count,
        eos_token_ids=(),
    )


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
        for index in range(len(self.layers)):
            for name in (f"layers.{index}.{output}" for output in OUTPUTS.values()):
                replaced[name] = SummedLinear(self.get_submodule(name), group)
        for name, module in replaced.items():
            self.set_submodule(name, module)


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
    checkpoint.check(whole_shapes(config), is_redundant=is_redundant_in(folder, config))
    decoder = on_meta_device(lambda: ShardedDecoder(config, shard))
    allocate(decoder.to(dtype), device)
    checkpoint.copy_into(checkpoint_views(decoder), lambda name: _part(name, config, shard) or ())
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


def _part(name: str, config: ModelConfig, shard: Shard) -> tuple[slice, ...] | None:
    """Return the indices of a part of a checkpoint's tensor; None if it is not known how to divide it."""
    module, _, kind = re.sub(r"^model\.layers\.\d+\.", "", name).rpartition(".")
    query_size = config.num_heads * config.head_dim
    if module.endswith("norm"):
        return (slice(None),)
    if module in QUERY:
        return (_span(query_size, shard),)
    if module in KEY_VALUE:
        # Where there are fewer key heads than parts, successive parts share one.
        heads = max(1, config.num_kv_heads // shard.count)
        first = shard.rank * config.num_kv_heads // shard.count
        return (slice(first * config.head_dim, (first + heads) * config.head_dim),)
    if module in GATE_UP:
        return (_span(config.intermediate_size, shard),)
    if module in OUTPUTS:
        columns = query_size if module == "self_attn.o_proj" else config.intermediate_size
        return (slice(None), _span(columns, shard)) if kind == "weight" else (slice(None),)
    if module in VOCABULARY:
        tokens = shard.tokens(config.vocab_size)
        return (slice(tokens.start, tokens.stop),)
    return None


def _span(size: int, shard: Shard) -> slice:
    return slice(size // shard.count * shard.rank, size // shard.count * (shard.rank + 1))


def _clear_output_biases(decoder: Decoder) -> None:
    """Set the biases of projections whose outputs are summed to zero, since rank 0 adds them."""
    for name, parameter in decoder.named_parameters():
        if name.endswith(tuple(f"{module}.bias" for module in OUTPUTS.values())):
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


class SummedLinear(nn.Module):
    """A linear layer for some input channels, summed over ranks."""

    def __init__(self, linear: nn.Module, group: Group) -> None:
        super().__init__()
        self.linear = linear
        self._group = group

    def forward(self, hidden: Tensor) -> Tensor:
        """Map this rank's channels [N, in] to [N, out]."""
        return self._group.sum(self.linear(hidden))


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
