"""Mixtures of experts in `config.json` and in checkpoints, by model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.config import ExpertsConfig, ModelConfig

Fields = Mapping[str, Any]

MIXTRAL = "MixtralForCausalLM"
QWEN3_MOE = "Qwen3MoeForCausalLM"


def read_experts(architecture: str, fields: Fields) -> ExpertsConfig | None:
    """Return the experts that the fields of a `config.json` describe; None for a dense family.

    Raises KeyError for a missing field, ValueError for an invalid one.
    """
    if architecture == MIXTRAL:
        return ExpertsConfig(
            count=int(fields["num_local_experts"]),
            per_token=int(fields["num_experts_per_tok"]),
            intermediate_size=int(fields["intermediate_size"]),
            layers=tuple(range(int(fields["num_hidden_layers"]))),
        )
    if architecture == QWEN3_MOE:
        # transformers 5 renamed the field.
        count = int(fields["num_experts"] if "num_experts" in fields else fields["num_local_experts"])
        dense, interval = set(fields.get("mlp_only_layers") or ()), int(fields["decoder_sparse_step"])
        layers = range(int(fields["num_hidden_layers"]))
        return ExpertsConfig(
            count=count,
            per_token=int(fields["num_experts_per_tok"]),
            intermediate_size=int(fields["moe_intermediate_size"]),
            layers=tuple(layer for layer in layers if layer not in dense and (layer + 1) % interval == 0),
            is_normalised=bool(fields["norm_topk_prob"]),
        )
    return None


def experts_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a `config.json` that `read_experts` reads back."""
    experts = config.experts
    if experts is None:
        return {}
    if config.architecture == MIXTRAL:
        return {"num_local_experts": experts.count, "num_experts_per_tok": experts.per_token}
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(config.num_layers) if layer not in experts.layers],
        "norm_topk_prob": experts.is_normalised,
    }


def expert_parts(name: str, config: ModelConfig) -> list[tuple[str, int]]:
    """Return names within a layer, and rows, of the tensors that a parameter of a `MixtureOfExperts` concatenates."""
    experts = config.experts
    assert experts is not None
    is_mixtral = config.architecture == MIXTRAL
    block = "block_sparse_moe" if is_mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    size, shared, each = experts.intermediate_size, experts.shared_size, range(experts.count)
    parts = {
        "router.proj.weight": [("gate.weight", experts.count)],
        "router.correction": [("gate.e_score_correction_bias", experts.count)],
        "experts.gate_up_proj.weight": [(f"experts.{n}.{half}.weight", size) for n in each for half in (gate, up)],
        "experts.down_proj.weight": [(f"experts.{n}.{down}.weight", config.hidden_size) for n in each],
        "shared.gate_up_proj.weight": [(f"shared_experts.{half}.weight", shared) for half in (gate, up)],
        "shared.down_proj.weight": [(f"shared_experts.{down}.weight", config.hidden_size)],
    }
    return [(f"{block}.{part}", rows) for part, rows in parts[name]]
