"""Mixtures of experts in `config.json` and in checkpoints, by model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from engine.models.config import ExpertsConfig, ModelConfig
from ssd.errors import UserError

Fields = Mapping[str, Any]

MIXTRAL = "MixtralForCausalLM"
QWEN3_MOE = "Qwen3MoeForCausalLM"
DEEPSEEK_V2 = "DeepseekV2ForCausalLM"
DEEPSEEK_V3 = "DeepseekV3ForCausalLM"


def read_experts(architecture: str, fields: Fields) -> ExpertsConfig | None:
    """Return the experts that the fields of a `config.json` describe; None for a dense family.

    Raises KeyError for a missing field, ValueError for an invalid one, UserError for a routing that this engine lacks.
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
            is_normalized=bool(fields["norm_topk_prob"]),
        )
    if architecture in (DEEPSEEK_V2, DEEPSEEK_V3):
        return _read_deepseek(fields, has_correction=architecture == DEEPSEEK_V3)
    return None


def _read_deepseek(fields: Fields, *, has_correction: bool) -> ExpertsConfig:
    """Read the experts of DeepSeek-V2, or of V3, whose scores have a correction."""
    method = fields["topk_method"]
    known = ("noaux_tc",) if has_correction else ("greedy", "group_limited_greedy")
    scores: Literal["softmax", "sigmoid"] = "sigmoid" if has_correction else "softmax"
    unsupported = (method not in known, fields.get("scoring_func", scores) != scores, fields["moe_layer_freq"] != 1)
    if any(unsupported) or (not has_correction and fields["norm_topk_prob"]):
        raise UserError(
            f"config.json requires a routing of experts that this engine does not have (topk_method {method!r}, "
            f"scoring_func {fields.get('scoring_func', scores)!r}, moe_layer_freq {fields['moe_layer_freq']}, "
            f"norm_topk_prob {fields['norm_topk_prob']})"
        )
    size = int(fields["moe_intermediate_size"])
    has_groups = method != "greedy"
    return ExpertsConfig(
        count=int(fields["n_routed_experts"]),
        per_token=int(fields["num_experts_per_tok"]),
        intermediate_size=size,
        layers=tuple(range(int(fields["first_k_dense_replace"]), int(fields["num_hidden_layers"]))),
        shared_size=size * int(fields["n_shared_experts"] or 0),
        scores=scores,
        is_normalized=bool(fields["norm_topk_prob"]),
        scaling=float(fields["routed_scaling_factor"]),
        groups=int(fields["n_group"] or 1) if has_groups else 1,
        groups_kept=int(fields["topk_group"] or 1) if has_groups else 1,
        group_members=2 if has_correction else 1,
        has_correction=has_correction,
    )


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
