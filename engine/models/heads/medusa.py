"""Medusa heads: the head of index i predicts the token i + 2 places after the target's last position.

Cai et al., "Medusa" (2024), version 1: residual blocks and an output projection per head, on the target's last state.
They are read and written in the authors' format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.heads.head import normalize
from engine.models.heads.source import Blueprint, HeadFolder, Views
from engine.models.loader import on_meta_device
from ssd.errors import UserError

MAX_HEADS = 100
"""Largest number of heads, and of blocks per head, that is not taken for an error."""


class ResidualBlock(nn.Module):
    """x + SiLU(linear(x))."""

    def __init__(self, size: int, *, has_bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=has_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states, [N, size] each."""
        return hidden + F.silu(self.linear(hidden))


class MedusaHeads(nn.Module):
    """Predicts several next tokens independently of each other, without attention."""

    def __init__(self, config: ModelConfig, count: int, blocks: int = 1, *, has_bias: bool = True) -> None:
        """config: the target's shape. count: number of heads. blocks: residual blocks per head, with a bias each."""
        super().__init__()
        self.config = config
        self.hidden_layers = (config.num_layers,)
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(config.hidden_size, has_bias=has_bias) for _ in range(blocks)),
                nn.Linear(config.hidden_size, config.vocab_size, bias=False),
            )
            for _ in range(count)
        )
        self._attached: tuple[Decoder, ...] = ()

    def attach(self, target: Decoder) -> None:
        """Use the target's final norm."""
        self._attached = (target,)

    def target_states(self, hidden: Tensor) -> Tensor:
        """Return the normalized last states, [N, hidden_size]; hidden: [N, 1, hidden_size]."""
        return normalize(self._attached[0].norm, hidden[:, 0])

    def forward(self, states: Tensor) -> Tensor:
        """Return logits [N, count, vocab_size] for states [N, hidden_size]."""
        return torch.stack([head(states) for head in self.heads], dim=1)


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
    sizes = {name: source.number(fields, name, getattr(target, name)) for name in ("hidden_size", "vocab_size")}
    source.refuse_other_target(target, sizes)
    has_bias = any(name.endswith(".bias") for name in source.names)
    head = on_meta_device(lambda: MedusaHeads(target, count, blocks, has_bias=has_bias))
    return Blueprint(head, _views, is_redundant=lambda _name: False)


def medusa_files(heads: MedusaHeads, dtype: torch.dtype) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Return the configuration and the tensors of heads in the authors' format, with the fields that vLLM needs."""
    [*blocks, _] = heads.heads[0].children()
    views = _views(heads)
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": len(heads.heads),
        "medusa_num_layers": len(blocks),
        "medusa_fc_bias": any(name.endswith(".bias") for name in views),  # without it vLLM ignores the biases
        "hidden_size": heads.config.hidden_size,
        "vocab_size": heads.config.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }, views


def _views(heads: MedusaHeads) -> Views:
    return {name.removeprefix("heads."): parameter.detach() for name, parameter in heads.named_parameters()}
