"""Read and write Medusa-1 heads in their authors' format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.heads.medusa import MedusaHeads, ResidualBlock
from engine.models.heads.source import Blueprint, HeadFolder, Views
from engine.models.loader import on_meta_device
from ssd.errors import UserError

MAX_HEADS = 100
"""Largest number of heads, and of blocks per head, that is not taken for an error."""


def read_medusa(source: HeadFolder, target: ModelConfig) -> Blueprint[MedusaHeads]:
    """Return the Medusa heads of a folder. Raises UserError if it has none, or if they are for another target."""
    fields = source.fields
    source.refuse_without("0.0.linear.weight", "Medusa heads")
    count, blocks = source.number(fields, "medusa_num_heads", 0), source.number(fields, "medusa_num_layers", 1)
    if not (1 <= count <= MAX_HEADS and 1 <= blocks <= MAX_HEADS):
        raise UserError(
            f"{source.folder}/config.json describes {count} Medusa heads of {blocks} layers; give another folder"
        )
    # The authors' configurations name neither size.
    source.refuse_other_target(
        target,
        hidden_size=source.number(fields, "hidden_size", target.hidden_size),
        vocab_size=source.number(fields, "vocab_size", target.vocab_size),
    )
    has_bias = any(name.endswith(".bias") for name in source.names)
    head = on_meta_device(lambda: MedusaHeads(target, count, blocks))

    def finish(head: MedusaHeads) -> None:
        if not has_bias:
            for block in head.modules():
                if isinstance(block, ResidualBlock):
                    block.linear.bias.zero_()

    return Blueprint(head, lambda head: _views(head, has_bias), lambda _name: False, finish)


def medusa_files(heads: MedusaHeads, dtype: torch.dtype) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Return the configuration and the tensors of heads in the authors' format, with the fields that vLLM needs."""
    blocks = len(_sequence(heads.heads[0])) - 1
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": len(heads.heads),
        "medusa_num_layers": blocks,
        "medusa_fc_bias": True,  # without it vLLM ignores the biases
        "hidden_size": heads.config.hidden_size,
        "vocab_size": heads.config.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }, _views(heads, has_bias=True)


def _views(heads: MedusaHeads, has_bias: bool) -> Views:
    views: Views = {}
    for index, modules in enumerate(map(_sequence, heads.heads)):
        *blocks, projection = modules
        for number, block in enumerate(blocks):
            assert isinstance(block, ResidualBlock)
            name = f"{index}.{number}.linear"
            views[f"{name}.weight"] = block.linear.weight.detach()
            if has_bias:
                views[f"{name}.bias"] = block.linear.bias.detach()
        assert isinstance(projection, nn.Linear)
        views[f"{index}.{len(blocks)}.weight"] = projection.weight.detach()
    return views


def _sequence(head: nn.Module) -> nn.Sequential:
    assert isinstance(head, nn.Sequential)
    return head
