"""Convert between `config.json` and `ModelConfig`: the fields that all families share.

Reads the formats of transformers 4 and 5. Configurations that would load but give wrong logits are refused.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from engine.models.config import ModelConfig
from engine.models.families import FAMILIES, Fields
from engine.models.folders import token_ids
from engine.models.quantization import read_quantization
from engine.models.rope import Linear, Llama3, Rope, Scaling, Yarn, yarn_attention_factor
from ssd.errors import UserError

SCALINGS: dict[str, type[Scaling]] = {"linear": Linear, "llama3": Llama3, "yarn": Yarn}


def config_from_hf(fields: Fields) -> ModelConfig:
    """Return the shape that the fields of a `config.json` describe.

    Raises UserError for another architecture, a missing field, or a feature that this decoder lacks.
    """
    architecture = _architecture(fields)
    family = FAMILIES[architecture]
    fields = {**family.defaults, **fields, **family.fixed}
    try:
        _refuse_unsupported(fields)
        num_heads = int(fields["num_attention_heads"])
        hidden_size = int(fields["hidden_size"])
        attention_bias = bool(fields.get("attention_bias", False))
        rope = _rope(fields)
        latent = None if family.latent is None else family.latent(fields, rope)
        num_kv_heads = int(fields.get("num_key_value_heads") or num_heads) if latent is None else 1
        head_dim = fields.get("head_dim") if latent is None else fields["qk_rope_head_dim"]
        return ModelConfig(
            vocab_size=int(fields["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(fields["intermediate_size"]),
            num_layers=int(fields["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=int(head_dim or hidden_size // max(1, num_heads)),
            max_positions=_context_window(fields, rope),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            rope=rope,
            tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or family.always_qkv_bias,
            output_bias=attention_bias,
            mlp_bias=bool(fields.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            latent=latent,
            experts=None if family.experts is None else family.experts(fields),
            architecture=architecture,
            bos_token_id=next(iter(token_ids(fields.get("bos_token_id"))), None),
            eos_token_ids=token_ids(fields.get("eos_token_id")),
        )
    except KeyError as missing:
        raise UserError(f"config.json lacks the field {missing}; is the model folder complete?") from None
    except (TypeError, ValueError, OverflowError) as problem:
        raise UserError(f"config.json has an invalid field: {problem}; download or copy it again") from None


def config_to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the fields of a `config.json` for weights of a dtype, without experts and latent attention.

    `config_from_hf` and transformers read them back.
    """
    eos, rope = config.eos_token_ids, config.rope
    kinds = {kind: name for name, kind in SCALINGS.items()}
    scaling = {} if rope.scaling is None else asdict(rope.scaling)
    rope_type = "default" if rope.scaling is None else kinds[type(rope.scaling)]
    return {
        "architectures": [config.architecture],
        "model_type": FAMILIES[config.architecture].model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "sliding_window": None,  # the context window is not longer than a sliding window
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope.theta,
        "rope_parameters": {"rope_type": rope_type, "rope_theta": rope.theta, **scaling},
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "hidden_act": "silu",
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "torch_dtype": dtype,
    }


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else "none"
    if name not in FAMILIES:
        raise UserError(
            f"config.json names the architecture {name!r}, which this engine does not support; "
            f"give a folder with one of {', '.join(FAMILIES)}"
        )
    return str(name)


def _refuse_unsupported(fields: Fields) -> None:
    """Raise UserError for configurations that would load but give wrong logits."""
    read_quantization(fields)
    if fields.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json requires the activation {fields['hidden_act']!r}; this engine has only 'silu'")
    unknown = [kind for kind in fields.get("layer_types") or [] if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise UserError(f"config.json requires layers of {unknown[0]!r}; this engine has only full attention")


def _context_window(fields: Fields, rope: Rope) -> int:
    """Return the largest number of tokens for which every layer attends to all of them.

    A layer with a sliding window attends to all tokens as long as there are no more than the window's width.
    """
    positions = int(fields["max_position_embeddings"])
    if isinstance(rope.scaling, Yarn):
        # Checkpoints that leave it to users to add the scaling contain the unscaled number.
        positions = max(positions, int(rope.scaling.factor * rope.scaling.original_max_position_embeddings))
    window = fields.get("sliding_window") if fields.get("use_sliding_window") else None
    if window is None:
        return positions
    kinds = fields.get("layer_types")
    if kinds:
        slides = "sliding_attention" in kinds
    else:
        slides = int(fields["max_window_layers"]) < int(fields["num_hidden_layers"])
    return min(positions, int(window)) if slides else positions


def _rope(fields: Fields) -> Rope:
    """Read `rope_theta` and `rope_scaling` of transformers 4, or `rope_parameters` of transformers 5."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(fields.get(name) or {}, dict):
            raise UserError(f"config.json has {name} that is not an object; download or copy it again")
    values: dict[str, Any] = {
        "original_max_position_embeddings": fields["max_position_embeddings"],
        "rope_theta": fields.get("rope_theta", 10_000.0),
        "partial_rotary_factor": fields.get("partial_rotary_factor"),
        **(fields.get("rope_scaling") or fields.get("rope_parameters") or {}),
    }
    if "original_max_position_embeddings" in fields:
        values["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    if any(isinstance(value, dict) for value in values.values()) or (values["partial_rotary_factor"] or 1) != 1:
        raise UserError(
            "config.json has different rotary embeddings per layer or for part of a head; this engine supports only one"
        )
    rope_type = values.get("rope_type") or values.get("type") or "default"
    return Rope(float(values["rope_theta"]), _scaling(str(rope_type), values, int(fields["max_position_embeddings"])))


def _scaling(rope_type: str, values: Fields, positions: int) -> Scaling | None:
    if rope_type in ("default", "dynamic"):
        # Dynamic scaling changes nothing within the context window, which this engine never exceeds.
        return None
    if rope_type == "linear":
        return Linear(float(values["factor"]))
    original = int(values["original_max_position_embeddings"])
    if rope_type == "llama3":
        low, high = float(values["low_freq_factor"]), float(values["high_freq_factor"])
        return Llama3(float(values["factor"]), low, high, original)
    if rope_type == "yarn":
        factor = float(values.get("factor") or positions / original)
        attention_factor = values.get("attention_factor")
        if attention_factor is None:
            attention_factor = yarn_attention_factor(factor, values.get("mscale"), values.get("mscale_all_dim"))
        return Yarn(
            factor,
            original,
            float(attention_factor),
            beta_fast=float(values.get("beta_fast") or 32),
            beta_slow=float(values.get("beta_slow") or 1),
            truncate=bool(values.get("truncate", True)),
        )
    known = ", ".join(["default", "dynamic", *SCALINGS])
    raise UserError(
        f"config.json requires rope scaling {rope_type!r}, which this engine does not support; it supports {known}"
    )
