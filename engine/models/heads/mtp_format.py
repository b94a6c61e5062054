"""Read and write MTP layers in the forms of `mtp_names`, in a target's own folder or in one of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.families import config_to_hf
from engine.models.heads.mtp import MtpHead, MtpStyle
from engine.models.heads.mtp_names import MIMO, MtpForm, deepseek, find_mtp_form
from engine.models.heads.source import Blueprint, HeadFolder, Views, layer_views
from engine.models.loader import on_meta_device
from engine.models.self_attention import RMSNorm
from ssd.errors import UserError

LATENTS = "self_attn.kv_a_proj_with_mqa.weight"
EXPERTS = "mlp.gate.weight"
"""Tensors by which layers with latent attention and with experts are known."""


def read_mtp(source: HeadFolder, target: ModelConfig) -> Blueprint[MtpHead]:
    """Return the MTP layer of a folder. Raises UserError if it has none, or one for another target."""
    form = find_mtp_form(source.names)
    if form is None:
        raise UserError(
            f"{source.folder} has no MTP layer (model.mtp_layers.0, mtp or model.layers.N.eh_proj); "
            "give --draft-model a folder that has one, or choose another drafter"
        )
    _refuse_other_layer(source, form, target)
    fields = source.fields
    source.refuse_other_target(
        target, hidden_size=source.number(fields, "hidden_size"), vocab_size=source.number(fields, "vocab_size")
    )
    config = _block_config(source, form, source.layer_config(fields, form.block, target, may_have_latents=True))
    head = on_meta_device(lambda: MtpHead(config, target.num_layers, MtpStyle(zeroes_first=form.zeroes_first)))

    def finish(head: MtpHead) -> None:
        if form.hidden_first:
            _swap_inputs(head.fc)

    copies = tuple(form.prefix + name for name in form.copies)
    return Blueprint(
        head,
        lambda head: _views(head, form),
        is_redundant=lambda name: name in copies or not name.startswith(form.prefix),
        finish=finish,
    )


def mtp_files(head: MtpHead, dtype: torch.dtype) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Return the configuration and the tensors of an attached head in MiMo's form.

    vLLM and SGLang run a layer of this form beside any target. They take its decoder layer to be Qwen2's, whose
    queries, keys and values have biases, and vLLM demands copies of the target's embedding and output projection.
    """
    if not head.style.zeroes_first:
        raise ValueError("MiMo's form replaces the first embedding with zeros, but this head was trained without")
    config = replace(head.config, num_layers=head.hidden_layers[0], architecture="MiMoForCausalLM")
    views = _views(head, MIMO)
    projection = f"{MIMO.prefix}{MIMO.projection}.weight"
    views[projection] = views[projection].roll(head.config.hidden_size, dims=1)
    for part in ("q_proj", "k_proj", "v_proj"):
        weight = views[f"{MIMO.block}self_attn.{part}.weight"]
        views.setdefault(f"{MIMO.block}self_attn.{part}.bias", weight.new_zeros(len(weight)))
    views["model.embed_tokens.weight"] = head.target.embedding.weight.detach()
    views["lm_head.weight"] = head.target.lm_head.weight.detach()
    fields = config_to_hf(replace(config, tie_embeddings=False), str(dtype).removeprefix("torch."))
    # transformers has no class for MiMo; its decoder layers are those of Qwen2.
    return {**fields, "model_type": "qwen2", "num_nextn_predict_layers": 1, "qk_norm": config.qk_norm}, views


def _views(head: MtpHead, form: MtpForm) -> Views:
    own: dict[str, RMSNorm | nn.Linear] = {
        form.embedding_norm: head.embedding_norm,
        form.hidden_norm: head.hidden_norm,
        form.projection: head.fc,
        form.final_norm: head.norm,
    }
    views: Views = {f"{form.prefix}{name}.weight": module.weight.detach() for name, module in own.items()}
    return views | layer_views(head.layer, head.config, form.block)


def _swap_inputs(projection: nn.Linear) -> None:
    """Exchange the columns for the hidden state and those for the embedding."""
    projection.weight.copy_(projection.weight.roll(projection.out_features, dims=1))


def _block_config(source: HeadFolder, form: MtpForm, config: ModelConfig) -> ModelConfig:
    """Return the shape of the layer alone. Raises UserError for parts that the configuration does not describe."""
    for name, what, described in (
        (LATENTS, "multi-head latent attention", config.latent),
        (EXPERTS, "experts", config.experts),
    ):
        if form.block + name in source.names and described is None:
            raise UserError(
                f"the MTP layer in {source.folder} has {what} ({form.block}{name}), which its config.json does not "
                "describe; use another drafter"
            )
    has_experts = config.experts is not None and form.block + EXPERTS in source.names
    experts = replace(config.experts, layers=(0,)) if config.experts is not None and has_experts else None
    return replace(config, num_layers=1, experts=experts)


def _refuse_other_layer(source: HeadFolder, form: MtpForm, target: ModelConfig) -> None:
    # SGLang exports the layer of DeepSeek's form as layer 0 of a folder of its own.
    numbered = f"{form.prefix}eh_proj.weight" in source.names
    if numbered and form.prefix not in (deepseek(0).prefix, deepseek(target.num_layers).prefix):
        raise UserError(
            f"the MTP layer in {source.folder} is {form.prefix[:-1]}, but for this target of {target.num_layers} "
            f"layers it must be model.layers.{target.num_layers}; give a head trained for it"
        )
