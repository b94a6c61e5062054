"""Read and write EAGLE-1 and EAGLE-2 heads in their authors' format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.families import config_to_hf
from engine.models.heads.eagle import EagleHead
from engine.models.heads.source import Blueprint, HeadFolder, Views, layer_views
from engine.models.loader import on_meta_device
from ssd.errors import UserError

EMBEDDING, BLOCK = "embed_tokens.weight", "layers.0."


def read_eagle(source: HeadFolder, target: ModelConfig) -> Blueprint[EagleHead]:
    """Return the EAGLE head of a folder. Raises UserError if it has none, or one for another target."""
    fields = source.fields
    source.refuse_without("fc.weight", "an EAGLE head")
    source.refuse_other_target(
        target, hidden_size=source.number(fields, "hidden_size"), vocab_size=source.number(fields, "vocab_size")
    )
    if source.number(fields, "num_hidden_layers", 1) != 1:
        raise UserError(f"{source.folder} has an EAGLE head of several layers; give a head of one layer")
    config = replace(source.layer_config(fields, BLOCK, target), num_layers=1)

    def new_head() -> EagleHead:
        head = EagleHead(config, target.num_layers, has_bias="fc.bias" in source.names)
        if EMBEDDING in source.names:
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
    fields = config_to_hf(replace(head.config, num_layers=1, tie_embeddings=False), str(dtype).removeprefix("torch."))
    fields["architectures"] = ["LlamaForCausalLMEagle", "EagleLlamaForCausalLM"]
    fields["model_type"] = "qwen3" if head.config.qk_norm else "llama"
    return {**fields, "qkv_bias": head.config.qkv_bias}, views


def _views(head: EagleHead) -> Views:
    views: Views = {f"fc.{name}": parameter.detach() for name, parameter in head.fc.named_parameters()}
    views |= layer_views(head.layer, head.config, BLOCK)
    if head.embedding is not None:
        views[EMBEDDING] = head.embedding.weight.detach()
    return views
