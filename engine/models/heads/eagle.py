"""EAGLE-1 and EAGLE-2 heads: a decoder layer over the pair (embedding, the target's last state).

Li et al., "EAGLE" (2024) and "EAGLE-2" (2024). Both versions have the same network; the second drafts dynamic trees.
They are read and written in the authors' format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.decoder import Layer
from engine.models.heads.head import DraftHead, HeadOutput, NoNorm
from engine.models.heads.source import Blueprint, HeadFolder, Views, config_fields, head_views
from engine.models.layers import PLAIN, Attend, Ops
from engine.models.loader import on_meta_device

EMBEDDING, BLOCK = "embed_tokens", "layers.0."


class EagleHead(DraftHead):
    """`layer(fc([embedding, state]))` without norms at the ends, then the target's output projection."""

    def __init__(self, config: ModelConfig, target_layers: int, *, has_bias: bool = True) -> None:
        """target_layers: number of layers of the target. has_bias: whether `fc` has a bias."""
        super().__init__(config)
        self.hidden_layers = (target_layers,)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=has_bias)
        self.layer = Layer(config, 0)
        self.layer.set_submodule("input_norm", NoNorm())

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend, ops: Ops = PLAIN
    ) -> HeadOutput:
        """See `DraftHead.forward`."""
        pairs = self.fc(torch.cat((self.embed(tokens), states), dim=-1))
        residual, change = self.layer(pairs, None, ops, self.rotation(positions, ops, pairs), attend)
        state = residual + change
        return HeadOutput(state, state)


def read_eagle(source: HeadFolder, target: ModelConfig) -> Blueprint[EagleHead]:
    """Return the EAGLE head of a folder. Raises UserError if it has none, or one for another target."""
    fields = source.fields
    source.refuse_without("fc.weight", "an EAGLE head")
    source.refuse_other_target(target, fields)
    source.refuse_several_layers(fields, "an EAGLE head")
    config = replace(source.layer_config(fields, BLOCK, target), num_layers=1)

    def new_head() -> EagleHead:
        head = EagleHead(config, target.num_layers, has_bias="fc.bias" in source.names)
        if f"{EMBEDDING}.weight" in source.names:
            head.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        return head

    return Blueprint(on_meta_device(new_head), _views, is_redundant=lambda name: name == "lm_head.weight")


def eagle_files(head: EagleHead, dtype: torch.dtype) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Return the configuration and the tensors of a head in the authors' format.

    A bias of `fc` is always written: SGLang leaves it uninitialized where the file has none, and vLLM ignores it, so
    only heads without a bias work in both. The authors' field `bias` is left out, because vLLM and SGLang take it to be
    about attention. vLLM reads the second architecture and SGLang the first one.
    """
    views = _views(head)
    if head.fc.bias is None:
        views["fc.bias"] = head.fc.weight.new_zeros(head.fc.out_features)
    return {
        **config_fields(head.config, dtype),
        "architectures": ["LlamaForCausalLMEagle", "EagleLlamaForCausalLM"],
        "model_type": "qwen3" if head.config.qk_norm else "llama",
        "qkv_bias": head.config.qkv_bias,
    }, views


def _views(head: EagleHead) -> Views:
    return head_views(head, BLOCK, {"embedding": EMBEDDING})
