"""Multi-token prediction (MTP): one further decoder layer over the target's last hidden state and the next token.

DeepSeek-V3 Technical Report (2024), section 2.2. To draft several tokens with a single layer, it is run again on its
own output. The states that enter it have passed the target's final norm, or, when it is run again, its own: vLLM 0.32,
SGLang 0.5.23 and transformers 5.23 agree on this for all families. MTP layers are read in the forms of
`families.MtpForm`, from the target's own folder or from one of their own, and written in MiMo's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.decoder import Layer
from engine.models.families import MIMO, MtpForm, deepseek, find_mtp_form
from engine.models.heads.head import DraftHead, HeadOutput, normalize
from engine.models.heads.source import Blueprint, HeadFolder, Views, config_fields, head_views
from engine.models.layers import PLAIN, Attend, Ops, RMSNorm
from engine.models.loader import on_meta_device
from ssd.errors import UserError

LATENTS = "self_attn.kv_a_proj_with_mqa.weight"
EXPERTS = "mlp.gate.weight"
"""Tensors by which layers with latent attention and with experts are known."""


class MtpHead(DraftHead):
    """`layer(fc([embedding_norm(embedding), hidden_norm(state)]))`, then a norm and the output projection."""

    def __init__(self, config: ModelConfig, target_layers: int, *, zeroes_first: bool = True) -> None:
        """target_layers: number of layers of the target. zeroes_first: whether the embedding of the first pair, at
        position 1, is replaced with zeros, as in DeepSeek-V3 and MiMo.
        """
        super().__init__(config)
        self.zeroes_first = zeroes_first
        self.hidden_layers = (target_layers,)
        self.embedding_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = Layer(config, 0)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend, ops: Ops = PLAIN
    ) -> HeadOutput:
        """See `DraftHead.forward`."""
        embeddings = self.embed(tokens)
        if self.zeroes_first:
            embeddings = torch.where(positions[:, None] == 1, 0, embeddings)
        embeddings = normalize(self.embedding_norm, embeddings, ops)
        pairs = self.fc(torch.cat((embeddings, normalize(self.hidden_norm, states, ops)), dim=-1))
        residual, change = self.layer(pairs, None, ops, self.rotation(positions, ops, pairs), attend)
        hidden = self.norm.normalize_sum(residual, change, ops)[1]
        return HeadOutput(hidden, hidden)


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
    source.refuse_other_target(target, fields)
    config = _block_config(source, form, source.layer_config(fields, form.block, target, may_have_latents=True))
    head = on_meta_device(lambda: MtpHead(config, target.num_layers, zeroes_first=form.zeroes_first))

    def finish(head: MtpHead) -> None:
        if form.hidden_first:
            head.fc.weight.copy_(_swapped(head.fc.weight))

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
    if not head.zeroes_first:
        raise ValueError("MiMo's form replaces the first embedding with zeros, but this head was trained without")
    config = replace(head.config, num_layers=head.hidden_layers[0], architecture="MiMoForCausalLM")
    views = _views(head, MIMO)
    projection = f"{MIMO.prefix}{MIMO.projection}.weight"
    views[projection] = _swapped(views[projection])
    for part in ("q_proj", "k_proj", "v_proj"):
        weight = views[f"{MIMO.block}self_attn.{part}.weight"]
        views.setdefault(f"{MIMO.block}self_attn.{part}.bias", weight.new_zeros(len(weight)))
    views["model.embed_tokens.weight"] = head.target.embedding.weight.detach()
    views["lm_head.weight"] = head.target.lm_head.weight.detach()
    # transformers has no class for MiMo; its decoder layers are those of Qwen2.
    more = {"model_type": "qwen2", "num_nextn_predict_layers": 1, "qk_norm": config.qk_norm}
    return config_fields(config, dtype) | more, views


def _views(head: MtpHead, form: MtpForm) -> Views:
    names = {
        "embedding_norm": form.embedding_norm,
        "hidden_norm": form.hidden_norm,
        "fc": form.projection,
        "norm": form.final_norm,
    }
    return head_views(head, form.block, {module: form.prefix + name for module, name in names.items()})


def _swapped(projection: Tensor) -> Tensor:
    """Exchange the columns for the hidden state and those for the embedding."""
    return projection.roll(len(projection), dims=1)


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
