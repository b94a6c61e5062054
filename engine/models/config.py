"""Shape of a decoder. Independent of weights, of how a model is run, and of the format of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from engine.models.rope import Rope


def _check_range(config: object, names: Iterable[str], *, least: int = 1, of: str = "") -> None:
    """Raise ValueError unless the sizes with these names are from `least` to 2**31 - 1."""
    for name in names:
        if not least <= getattr(config, name) < 1 << 31:
            raise ValueError(f"{name}{of} must be from {least} to {(1 << 31) - 1}, not {getattr(config, name)}")


@dataclass(frozen=True)
class ExpertsConfig:
    """Shape of a mixture of experts, and how tokens choose experts."""

    count: int
    """Number of experts of a layer, without shared ones."""
    per_token: int
    """Number of experts that each token uses."""
    intermediate_size: int
    """Intermediate size of one expert."""
    layers: tuple[int, ...]
    """Layers that have experts; others have a dense feed-forward network."""
    shared_size: int = 0
    """Intermediate size of the experts that all tokens share, together; 0 if there are none."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    is_normalized: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    scaling: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Number of groups of consecutive experts."""
    groups_kept: int = 1
    """Number of groups from which a token may choose."""
    group_members: int = 1
    """A group is ranked by the sum of this number of its best scores."""
    has_correction: bool = False
    """Whether a learned term is added to the scores by which experts are chosen."""

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid shape."""
        names = ("count", "per_token", "intermediate_size", "groups", "groups_kept", "group_members")
        _check_range(self, names, of=" of experts")
        if self.count % self.groups or self.groups_kept > self.groups:
            raise ValueError(f"{self.count} experts cannot choose {self.groups_kept} of {self.groups} groups")
        members = self.count // self.groups
        if self.group_members > members or self.per_token > self.groups_kept * members:
            raise ValueError(
                f"a token cannot use {self.per_token} experts of {self.groups_kept} groups of {members} experts"
            )


@dataclass(frozen=True)
class LatentConfig:
    """Shape of multi-head latent attention; `ModelConfig.head_dim` is the size of the rotated part of a key."""

    query_rank: int
    """Rank of the query projection; 0 if it is one matrix."""
    latent_dim: int
    """Size of the vector from which a token's keys and values are computed."""
    nope_dim: int
    """Size of the part of a key that is not rotated."""
    value_dim: int
    is_interleaved: bool = True
    """Whether components 2i and 2i + 1 are rotated together, not i and i + head_dim / 2."""
    sharpness: float = 1.0
    """Factor of the scores, of models with YaRN."""

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid shape."""
        _check_range(self, ("query_rank",), least=0)
        _check_range(self, ("latent_dim", "nope_dim", "value_dim"))

    def scale(self, query_dim: int) -> float:
        """Return the factor of the scores of queries of a size."""
        return float(query_dim**-0.5 * self.sharpness)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Llama-like decoder, and the features in which model families differ."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    """Context window in tokens, prompt and output together."""
    rms_norm_eps: float = 1e-5
    rope: Rope = field(default_factory=Rope)
    tie_embeddings: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the projection after attention has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalized, per head."""
    latent: LatentConfig | None = None
    """Latent attention, whose entries in the cache are one key head; None for keys and values of `num_kv_heads`."""
    experts: ExpertsConfig | None = None
    """Experts of some layers; None for a dense model."""
    architecture: str = "LlamaForCausalLM"
    """Class name of the model in transformers."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an output."""

    @property
    def key_dim(self) -> int:
        """Size of a key in the cache."""
        return self.head_dim if self.latent is None else self.latent.latent_dim + self.head_dim

    @property
    def cache_size(self) -> int:
        """Number of values in the cache for each token and layer. The values of latent attention are part of keys."""
        return self.num_kv_heads * self.key_dim * (2 if self.latent is None else 1)

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid shape."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        _check_range(self, (*sizes, "head_dim", "max_positions"))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key heads evenly")
        if self.latent is not None and self.num_kv_heads != 1:
            raise ValueError(f"latent attention has one key head, not {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}")
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"the end token {token} is outside the vocabulary of {self.vocab_size}")
