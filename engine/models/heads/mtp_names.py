"""Names of the tensors of multi-token prediction (MTP) layers in published checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any


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
