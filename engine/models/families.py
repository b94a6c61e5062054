"""The supported families of models: whatever differs between them is in this module.

To add a family, add an entry to `FAMILIES`, and if its files need them, a reader of its experts, a line in
`layer_tensors` or an `MtpForm`; then add a shape to `FAMILIES` of tests/engine/models/test_families.py, which compares
logits with those of transformers. What all families share is in `hf_config` (fields of `config.json`) and in `decoder`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from engine.models.config import ExpertsConfig, LatentConfig, ModelConfig
from engine.models.rope import Rope, yarn_sharpness
from ssd.errors import UserError

Fields = Mapping[str, Any]
"""Fields of a `config.json`."""
Parts = list[tuple[str, int]]
"""Names and rows of the tensors of a checkpoint that a parameter concatenates."""


class ExpertNames(NamedTuple):
    """Names of a mixture of experts within a layer of a checkpoint."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class Family:
    """Properties of an architecture that its `config.json` does not contain."""

    model_type: str
    defaults: Fields = field(default_factory=dict)
    """Values of fields that a `config.json` may leave out."""
    fixed: Fields = field(default_factory=dict)
    """Values of fields that the architecture ignores."""
    gguf: str | None = None
    """Name of the architecture in GGUF files; None if it is not read from them."""
    always_qkv_bias: bool = False
    qk_norm: bool = False
    latent: Callable[[Fields, Rope], LatentConfig] | None = None
    """Reader of the multi-head latent attention; None for a key and a value of each group of heads."""
    experts: Callable[[Fields], ExpertsConfig] | None = None
    """Reader of the experts; None for a dense family. Like `latent`, it raises KeyError for a missing field, ValueError
    for an invalid one, and UserError for a feature that this engine lacks."""
    expert_names: ExpertNames = field(default_factory=ExpertNames)


def _mixtral_experts(fields: Fields) -> ExpertsConfig:
    return ExpertsConfig(
        count=int(fields["num_local_experts"]),
        per_token=int(fields["num_experts_per_tok"]),
        intermediate_size=int(fields["intermediate_size"]),
        layers=tuple(range(int(fields["num_hidden_layers"]))),
    )


def _qwen3_experts(fields: Fields) -> ExpertsConfig:
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


def _deepseek_experts(fields: Fields, *, is_v3: bool) -> ExpertsConfig:
    """Read the experts of DeepSeek-V2, or of V3, whose scores are sigmoids with a correction."""
    method = fields["topk_method"]
    known = ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
    scores: Literal["softmax", "sigmoid"] = "sigmoid" if is_v3 else "softmax"
    given = fields.get("scoring_func", scores)
    is_supported = method in known and given == scores and fields["moe_layer_freq"] == 1
    if not is_supported or (fields["norm_topk_prob"] and not is_v3):
        raise UserError(
            f"config.json requires a routing of experts that this engine does not have (topk_method {method!r}, "
            f"scoring_func {given!r}, moe_layer_freq {fields['moe_layer_freq']}, "
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
        group_members=2 if is_v3 else 1,
        has_correction=is_v3,
    )


def _deepseek_latent(fields: Fields, rope: Rope) -> LatentConfig:
    if fields.get("attention_bias"):
        raise UserError("config.json requires biases in latent attention, which this engine does not support")
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    weight = float(scaling.get("mscale_all_dim") or 0)
    sharpness = 1.0 if rope.scaling is None else yarn_sharpness(rope.scaling.factor, weight)
    return LatentConfig(
        query_rank=int(fields["q_lora_rank"] or 0),
        latent_dim=int(fields["kv_lora_rank"]),
        nope_dim=int(fields["qk_nope_head_dim"]),
        value_dim=int(fields["v_head_dim"]),
        is_interleaved=bool(fields.get("rope_interleave", True)),
        sharpness=sharpness**2,
    )


NO_BIAS = {"attention_bias": False, "mlp_bias": False}
ALL_SLIDE = {"use_sliding_window": True, "layer_types": None, "max_window_layers": 0}
QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
QWEN3_EXPERTS = {
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "num_experts_per_tok": 8,
}
DEEPSEEK = {
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_shared_experts": None,
    "norm_topk_prob": False,
    "q_lora_rank": 1536,
    "rope_interleave": True,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}

FAMILIES = {
    "LlamaForCausalLM": Family("llama", fixed={"use_sliding_window": False}, gguf="llama"),
    "MistralForCausalLM": Family(
        "mistral", defaults={"num_key_value_heads": 8, "sliding_window": 4096}, fixed={**NO_BIAS, **ALL_SLIDE}
    ),
    "Qwen2ForCausalLM": Family("qwen2", defaults=QWEN_DEFAULTS, fixed=NO_BIAS, gguf="qwen2", always_qkv_bias=True),
    # Qwen2 and MTP layers.
    "MiMoForCausalLM": Family("mimo", defaults=QWEN_DEFAULTS, fixed=NO_BIAS, always_qkv_bias=True),
    "Qwen3ForCausalLM": Family(
        "qwen3", defaults={**QWEN_DEFAULTS, "head_dim": 128}, fixed={"mlp_bias": False}, gguf="qwen3", qk_norm=True
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        defaults={"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        fixed={**NO_BIAS, **ALL_SLIDE},
        experts=_mixtral_experts,
        expert_names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        defaults={"num_key_value_heads": 4, "sliding_window": 4096, **QWEN3_EXPERTS},
        fixed={"mlp_bias": False, "layer_types": None, "max_window_layers": 0},
        qk_norm=True,
        experts=_qwen3_experts,
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        defaults=DEEPSEEK,
        fixed={"mlp_bias": False, "rope_interleave": True},
        latent=_deepseek_latent,
        experts=partial(_deepseek_experts, is_v3=False),
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        defaults={**DEEPSEEK, "topk_method": "noaux_tc", "norm_topk_prob": True, "first_k_dense_replace": 3},
        fixed={"mlp_bias": False},
        latent=_deepseek_latent,
        experts=partial(_deepseek_experts, is_v3=True),
    ),
}
"""Supported architectures, by the name of their class in transformers."""


def checkpoint_parts(name: str, config: ModelConfig) -> Parts:
    """Return names and rows of the checkpoint's tensors that the decoder's parameter `name` concatenates."""
    whole = {
        "embedding.weight": ("model.embed_tokens.weight", config.vocab_size),
        "norm.weight": ("model.norm.weight", config.hidden_size),
        "lm_head.weight": ("lm_head.weight", config.vocab_size),
    }
    if name in whole:
        return [whole[name]]
    _, layer, part = name.split(".", 2)
    return [(f"model.layers.{layer}.{suffix}", rows) for suffix, rows in layer_parts(part, config)]


def layer_parts(name: str, config: ModelConfig) -> Parts:
    """Return names within a layer, and rows, of the tensors that the parameter `name` of a `Layer` concatenates.

    The rows of stacked weights, [experts, out, in], are those of [experts * out, in].
    """
    tensors = layer_tensors(config)
    if name in tensors:
        return tensors[name]
    module, _, kind = name.rpartition(".")
    return [(f"{part}.{kind}", rows) for part, rows in tensors[module]]


@lru_cache(maxsize=16)
def layer_tensors(config: ModelConfig) -> Mapping[str, Parts]:
    """Return the modules of a checkpoint that each module of a `Layer` concatenates, and their rows.

    Parameters that are neither the weight nor the bias of a module are among the keys, with the names of tensors.
    """
    names = FAMILIES[config.architecture].expert_names
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, head_dim, latent, experts = config.hidden_size, config.head_dim, config.latent, config.experts
    parts: dict[str, Parts] = {
        "input_norm": [("input_layernorm", hidden)],
        "attention.qkv_proj": [
            (f"self_attn.{each}_proj", rows) for each, rows in zip("qkv", (heads, kv_heads, kv_heads), strict=True)
        ],
        "attention.qk_norm.query": [("self_attn.q_norm", head_dim)],
        "attention.qk_norm.key": [("self_attn.k_norm", head_dim)],
        "attention.o_proj": [("self_attn.o_proj", hidden)],
        "mlp_norm": [("post_attention_layernorm", hidden)],
        "hidden_norm": [("hidden_norm", hidden)],  # of EAGLE-3's layer
        "feed_forward.gate_up_proj": [(f"mlp.{half}_proj", config.intermediate_size) for half in ("gate", "up")],
        "feed_forward.down_proj": [("mlp.down_proj", hidden)],
    }
    if latent is not None:
        query = config.num_heads * (latent.nope_dim + head_dim)
        expansion = config.num_heads * (latent.nope_dim + latent.value_dim)
        first = ("self_attn.q_a_proj", latent.query_rank) if latent.query_rank else ("self_attn.q_proj", query)
        parts |= {
            "attention.down_proj": [first, ("self_attn.kv_a_proj_with_mqa", latent.latent_dim + head_dim)],
            "attention.query_norm": [("self_attn.q_a_layernorm", latent.query_rank)],
            "attention.query_proj": [("self_attn.q_b_proj", query)],
            "attention.latent_norm": [("self_attn.kv_a_layernorm", latent.latent_dim)],
            "attention.expansion": [("self_attn.kv_b_proj.weight", expansion)],
        }
    if experts is not None:
        halves = ((names.gate, experts.intermediate_size), (names.up, experts.intermediate_size))
        each = [f"{names.block}.experts.{number}" for number in range(experts.count)]
        shared = f"{names.block}.shared_experts"
        parts |= {
            "feed_forward.router.proj": [(f"{names.block}.gate", experts.count)],
            "feed_forward.router.correction": [(f"{names.block}.gate.e_score_correction_bias", experts.count)],
            "feed_forward.experts.gate_up_proj": [(f"{one}.{half}", rows) for one in each for half, rows in halves],
            "feed_forward.experts.down_proj": [(f"{one}.{names.down}", hidden) for one in each],
            "feed_forward.shared.gate_up_proj": [(f"{shared}.{half}", experts.shared_size) for half, _ in halves],
            "feed_forward.shared.down_proj": [(f"{shared}.{names.down}", hidden)],
        }
    return parts


@dataclass(frozen=True)
class MtpForm:
    """Names and conventions of one form. Only the first MTP layer is used; it is run again to draft several tokens."""

    prefix: str
    """Prefix of all tensors of the layer."""
    block: str
    """Prefix of the tensors of its decoder layer."""
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    hidden_first: bool = False
    """Whether the hidden state precedes the embedding in the input of the projection."""
    zeroes_first: bool = True
    """Whether the embedding of the first pair is replaced with zeros."""
    copies: tuple[str, ...] = ()
    """Copies of tensors of the target, which the layer shares with it."""


MIMO = MtpForm(
    prefix="model.mtp_layers.0.",
    block="model.mtp_layers.0.",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    final_norm="final_layernorm",
    hidden_first=True,
)
QWEN = MtpForm(
    prefix="mtp.",
    block="mtp.layers.0.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    final_norm="norm",
    zeroes_first=False,
)


def deepseek(layer: int) -> MtpForm:
    """Return the form of DeepSeek-V3, in which the MTP layer is numbered as a further layer of the target."""
    prefix = f"model.layers.{layer}."
    return MtpForm(
        prefix=prefix,
        block=prefix,
        embedding_norm="enorm",
        hidden_norm="hnorm",
        projection="eh_proj",
        final_norm="shared_head.norm",
        copies=("embed_tokens.weight", "shared_head.head.weight"),
    )


def find_mtp_form(names: Collection[str]) -> MtpForm | None:
    """Return the form of the MTP layer among the tensors of a checkpoint, or None if there is none."""
    if any(name.startswith(MIMO.prefix) for name in names):
        return MIMO
    if any(name.startswith(QWEN.prefix) for name in names):
        return QWEN
    layers = mtp_layers(names)
    return deepseek(min(layers)) if layers else None


def mtp_layers(names: Collection[str]) -> list[int]:
    """Return the numbers of the MTP layers in the form of DeepSeek-V3 among the tensors of a checkpoint."""
    matches = (re.fullmatch(r"model\.layers\.(\d+)\.eh_proj\.weight", name) for name in names)
    return [int(match[1]) for match in matches if match]


def mtp_tensors(fields: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return whether a tensor of a target's checkpoint belongs to an MTP layer. fields: its `config.json`."""
    first, count = fields.get("num_hidden_layers"), fields.get("num_nextn_predict_layers")
    layers = range(first, first + count) if isinstance(first, int) and isinstance(count, int) else range(0)
    prefixes = ("model.mtp_layers.", "mtp.", *(f"model.layers.{layer}." for layer in layers))
    return lambda name: name.startswith(prefixes)
