"""Folders of published draft heads: what the readers of all formats share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from engine.models.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    Checkpoint,
    part_views,
    weight_files,
)
from engine.models.config import ModelConfig
from engine.models.families import FAMILIES, layer_parts
from engine.models.folders import read_json
from engine.models.heads.head import DraftHead
from engine.models.hf_config import config_from_hf, config_to_hf
from engine.models.quantization import read_quantization
from ssd.errors import UserError

H = TypeVar("H", bound=nn.Module)
Views = dict[str, Tensor]
"""Writable views of a module's weights by their names in a checkpoint."""

FILES = (WEIGHTS_FILE, INDEX_FILE, "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Weight files that heads are published in, or their index, in order of preference."""


class HeadFolder:
    """Configuration and weight files of a published head."""

    def __init__(self, folder: Path) -> None:
        """Raise UserError if there is no such folder, or if it lacks one of the files."""
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; give one with {CONFIG_FILE} and the weights of a draft head")
        self.folder = folder
        self.fields: Mapping[str, Any] = read_json(folder / CONFIG_FILE)
        self.checkpoint = Checkpoint(folder, _head_files(folder), read_quantization(self.fields))

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self.checkpoint.names())

    def number(self, fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
        """Return a count in the configuration. Raises UserError if it is missing or is not a count."""
        value = fields.get(name)
        value = default if value is None else value
        if value is None:
            raise UserError(f"{self.folder / CONFIG_FILE} lacks the field {name}; download or copy it again")
        if not isinstance(value, int) or value < 0:
            raise UserError(
                f"{name} in {self.folder / CONFIG_FILE} must be a count, not {value!r}; copy the file again"
            )
        return value

    def refuse_without(self, tensor: str, wanted: str) -> None:
        """Raise UserError unless the folder has the tensor by which `wanted`, such as "an EAGLE head", is known."""
        if tensor not in self.names:
            raise UserError(
                f"{self.folder} has no tensor {tensor}, so it does not have {wanted}; give --draft-model a folder that "
                "does, or choose the drafter that this folder is for"
            )

    def refuse_several_layers(self, fields: Mapping[str, Any], wanted: str) -> None:
        """Raise UserError if `wanted`, such as "an EAGLE head", has several decoder layers."""
        if self.number(fields, "num_hidden_layers", 1) != 1:
            raise UserError(f"{self.folder} has {wanted} of several layers; give a head of one layer")

    def layer_fields(self) -> Mapping[str, Any]:
        """Return the part of the configuration that describes decoder layers; the speculators library nests it."""
        fields = self.fields.get("transformer_layer_config", self.fields)
        if not isinstance(fields, dict):
            raise UserError(f"{self.folder / CONFIG_FILE} has no object transformer_layer_config; copy it again")
        return fields

    def refuse_other_target(self, target: ModelConfig, fields: Mapping[str, Any]) -> None:
        """Raise UserError unless the hidden size and the vocabulary that the head needs are those of the target."""
        hidden_size, vocab_size = self.number(fields, "hidden_size"), self.number(fields, "vocab_size")
        if (hidden_size, vocab_size) != (target.hidden_size, target.vocab_size):
            raise UserError(
                f"{self.folder} is a head for a target with hidden size {hidden_size} and {vocab_size} tokens, but "
                f"this target has hidden size {target.hidden_size} and {target.vocab_size} tokens; "
                "give a head trained for it"
            )

    def layer_config(
        self, fields: Mapping[str, Any], block: str, target: ModelConfig, *, may_have_latents: bool = False
    ) -> ModelConfig:
        """Return the shape of a head's decoder layers.

        fields: a configuration like that of a model. block: prefix of the first layer's tensors. Layers have the biases
        and the norms of queries and keys that are among these tensors, because configurations of heads often name
        neither. Positions are limited by the target alone. may_have_latents: whether this kind of head may have latent
        attention. Raises UserError for layers that this engine does not support.
        """
        path = self.folder / CONFIG_FILE
        architecture = _architecture(fields)
        if architecture in FAMILIES and FAMILIES[architecture].latent and not may_have_latents:
            raise UserError(f"{path} describes a head with latent attention, which this engine does not support")
        try:
            config = config_from_hf({**fields, "architectures": [architecture]})
        except UserError as problem:
            raise UserError(str(problem).replace(CONFIG_FILE, str(path), 1)) from None
        return replace(
            config,
            max_positions=max(config.max_positions, target.max_positions),
            qkv_bias=f"{block}self_attn.q_proj.bias" in self.names,
            output_bias=f"{block}self_attn.o_proj.bias" in self.names,
            mlp_bias=f"{block}mlp.down_proj.bias" in self.names,
            qk_norm=f"{block}self_attn.q_norm.weight" in self.names,
        )


@dataclass(frozen=True)
class Blueprint(Generic[H]):
    """A head that fits the target and its files, before its weights are read."""

    head: H
    """On the meta device."""
    views: Callable[[H], Views]
    """Returns the weights of the head by their names in the files."""
    is_redundant: Callable[[str], bool]
    """Returns whether the files may have a further tensor of this name."""
    finish: Callable[[H], None] = field(default=lambda _head: None)
    """Called with the head when the weights were read."""


def head_views(head: DraftHead, block: str, names: Mapping[str, str] = MappingProxyType({})) -> Views:
    """Return the weights of a head by their names in a checkpoint.

    block: prefix of the tensors of its decoder layer. names: names of its other modules, where they differ from those
    of the attributes.
    """
    views: Views = {}
    for name, parameter in head.named_parameters():
        module, _, kind = name.rpartition(".")
        if name.startswith("layer."):
            parts = layer_parts(name.removeprefix("layer."), head.config)
            views |= {block + part: view for part, view in part_views(parameter, parts).items()}
        else:
            views[f"{names.get(module, module)}.{kind}"] = parameter.detach()
    return views


def config_fields(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of a `config.json` that describe the decoder layer of a head."""
    return config_to_hf(replace(config, tie_embeddings=False), str(dtype).removeprefix("torch."))


def _architecture(fields: Mapping[str, Any]) -> str:
    """Return the family whose decoder layers a head has, or the unsupported name that the configuration has."""
    kind = str(fields.get("model_type") or "none")
    names = fields.get("architectures")
    own = names[0] if isinstance(names, list) and names else None
    return next((name for name, family in FAMILIES.items() if name == own or family.model_type == kind), kind)


def _head_files(folder: Path) -> list[Path]:
    for name in FILES:
        if (folder / name).exists():
            return weight_files(folder) if name == INDEX_FILE else [folder / name]
    raise UserError(f"{folder} has no weights; a draft head has one of {', '.join(FILES)}")
