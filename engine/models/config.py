"""Shape of a decoder. Independent of weights, of how a model is run, and of the format of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.models.rope import Rope


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
    architecture: str = "LlamaForCausalLM"
    """Class name of the model in transformers."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an output."""

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid shape."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
            if getattr(self, name) >= 1 << 31:
                raise ValueError(f"{name} must be less than {1 << 31}, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}")
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"the end token {token} is outside the vocabulary of {self.vocab_size}")
