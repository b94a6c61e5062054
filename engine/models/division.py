"""Divide a decoder over ranks (tensor parallelism; Shoeybi et al., Megatron-LM, 2019): the shape of each part.

Heads and the channels of feed-forward networks are divided, and a sum over all ranks follows each attention and each
feed-forward network. Each expert of a mixture is divided by channels too: every rank then reads the same number of
bytes, whichever experts the tokens of a step choose. Embedding and output projection are divided by tokens of the
vocabulary. Norms, routers, and the projections to latents are the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.models.config import ModelConfig
from ssd.errors import UserError

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
"""Tensors that are divided by tokens of the vocabulary. The parts may differ by one token."""


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


def part_slices(name: str, whole: tuple[int, ...], part: tuple[int, ...], shard: Shard) -> tuple[slice, ...]:
    """Return the indices of a part of a checkpoint's tensor. whole, part: shapes of the tensor and of its part.

    Dimensions of the same size are not divided. In the others, parts follow one another in the order of ranks; if the
    tensor has fewer parts than there are ranks, as with key heads, several successive ranks have the same one.
    """
    if name in VOCABULARY:
        tokens = shard.tokens(whole[0])
        return slice(tokens.start, tokens.stop), slice(0, whole[1])
    starts = [total * shard.rank // shard.count // size * size for total, size in zip(whole, part, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, part, strict=True))
