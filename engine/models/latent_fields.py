"""Multi-head latent attention in `config.json` and in checkpoints: DeepSeek-V2 and V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.config import LatentConfig, ModelConfig
from engine.models.rope import Rope, yarn_sharpness
from ssd.errors import UserError

Fields = Mapping[str, Any]


def read_latent(fields: Fields, rope: Rope) -> LatentConfig:
    """Return the latent attention that the fields of a `config.json` describe.

    Raises KeyError for a missing field, ValueError for an invalid one, UserError for a feature that this engine lacks.
    """
    if fields.get("attention_bias"):
        raise UserError("config.json requires biases in latent attention, which this engine does not support")
    weight = float(_rope_fields(fields).get("mscale_all_dim") or 0)
    sharpness = 1.0 if rope.scaling is None else yarn_sharpness(rope.scaling.factor, weight)
    return LatentConfig(
        query_rank=int(fields["q_lora_rank"] or 0),
        latent_dim=int(fields["kv_lora_rank"]),
        nope_dim=int(fields["qk_nope_head_dim"]),
        value_dim=int(fields["v_head_dim"]),
        is_interleaved=bool(fields.get("rope_interleave", True)),
        sharpness=sharpness**2,
    )


def latent_parts(name: str, config: ModelConfig) -> list[tuple[str, int]]:
    """Return names within a layer, and rows, of the tensors that a parameter of a `LatentAttention` concatenates."""
    latent = config.latent
    assert latent is not None
    query_rows = config.num_heads * (latent.nope_dim + config.head_dim)
    first = ("q_a_proj", latent.query_rank) if latent.query_rank else ("q_proj", query_rows)
    parts = {
        "down_proj.weight": [first, ("kv_a_proj_with_mqa", latent.latent_dim + config.head_dim)],
        "query_norm.weight": [("q_a_layernorm", latent.query_rank)],
        "query_proj.weight": [("q_b_proj", query_rows)],
        "latent_norm.weight": [("kv_a_layernorm", latent.latent_dim)],
        "expansion": [("kv_b_proj", config.num_heads * (latent.nope_dim + latent.value_dim))],
        "o_proj.weight": [("o_proj", config.hidden_size)],
    }
    return [(f"self_attn.{part}.weight", rows) for part, rows in parts[name]]


def _rope_fields(fields: Fields) -> Fields:
    return fields.get("rope_scaling") or fields.get("rope_parameters") or {}
