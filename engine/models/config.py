"""The shape of a decoder, read from and written to a Hugging Face `config.json`.

Knows the spelling of checkpoints, nothing of weights or of how a model is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssd.errors import UserError

ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of one Llama-style decoder."""

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
    rope_theta: float = 10_000.0
    tie_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an output."""

    def __post_init__(self) -> None:
        """Raises ValueError for a shape that no decoder can have."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}")
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"the end token {token} is outside the vocabulary of {self.vocab_size}")

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Read the fields of a `config.json`.

        Raises `UserError` for another architecture, a missing field, or a feature that this decoder lacks.
        """
        architecture = (fields.get("architectures") or ["none"])[0]
        if architecture not in ARCHITECTURES:
            raise UserError(
                f"config.json names the architecture {architecture!r}; this engine runs {', '.join(ARCHITECTURES)}"
            )
        _refuse_unsupported(fields)
        try:
            num_heads = int(fields["num_attention_heads"])
            hidden_size = int(fields["hidden_size"])
            return cls(
                vocab_size=int(fields["vocab_size"]),
                hidden_size=hidden_size,
                intermediate_size=int(fields["intermediate_size"]),
                num_layers=int(fields["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(fields.get("num_key_value_heads") or num_heads),
                head_dim=int(fields.get("head_dim") or hidden_size // max(1, num_heads)),
                max_positions=int(fields["max_position_embeddings"]),
                rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
                rope_theta=_rope_theta(fields),
                tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
                bos_token_id=fields.get("bos_token_id"),
                eos_token_ids=token_ids(fields.get("eos_token_id")),
            )
        except KeyError as missing:
            raise UserError(f"config.json lacks the field {missing}; is the model folder complete?") from None
        except (TypeError, ValueError) as problem:
            raise UserError(f"config.json holds a field that cannot be: {problem}") from None

    def to_hf(self, dtype: str) -> dict[str, Any]:
        """The fields of a `config.json` that `from_hf` and transformers read back, for weights of a dtype."""
        eos = self.eos_token_ids
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": dtype,
        }


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Refuse what would load but give other logits than the model's own."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(fields.get(name) or {}, dict):
            raise UserError(f"config.json holds {name} that is no object")
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type != "default":
        raise UserError(f"config.json asks for rope scaling {rope_type!r}; this engine has only the default rope")
    if fields.get("quantization_config"):
        raise UserError("config.json describes quantised weights; this engine reads float weights alone")
    if fields.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json asks for the activation {fields['hidden_act']!r}; this engine has only 'silu'")
    for bias in ("attention_bias", "mlp_bias"):
        if fields.get(bias):
            raise UserError(f"config.json sets {bias}; this engine runs Llama models without biases")


def _rope_theta(fields: Mapping[str, Any]) -> float:
    """`rope_parameters` is the spelling of transformers 5, `rope_theta` the one before it."""
    parameters = fields.get("rope_parameters") or {}
    return float(parameters.get("rope_theta", fields.get("rope_theta", 10_000.0)))


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """The ids of a field that holds none, one or several."""
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)
