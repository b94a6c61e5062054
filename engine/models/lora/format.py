"""Read LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Everything that can be refused is found in the configuration and in the headers of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.models.checkpoint import Checkpoint
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.families import checkpoint_parts
from engine.models.folders import read_json
from engine.models.loader import on_meta_device
from ssd.errors import UserError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of the names of modules in PEFT's weights."""
MAX_RANK = 512
"""Largest rank; vLLM's limit."""
MAX_ALPHA = 1e6
"""Largest `lora_alpha`, far above useful values."""
UNSUPPORTED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "lora_bias",
    "modules_to_save": "modules_to_save",
    "trainable_token_indices": "trainable_token_indices",
    "layer_replication": "layer_replication",
    "target_parameters": "target_parameters",
    "alora_invocation_tokens": "activated LoRA",
}
"""Settings that change what an adapter computes, with their names in errors; supported only where unset."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Kinds of `init_lora_weights` whose adapters belong to a changed base model, until PEFT converts them."""


class Place(NamedTuple):
    """Rows of a decoder's linear layer that a module of the checkpoint becomes."""

    layer: str
    """Name of the linear layer in the decoder."""
    rows: int
    inputs: int
    """Number of its inputs."""


class AdapterModule(NamedTuple):
    """The update scale * B A of one module."""

    place: Place
    rank: int
    scale: float


class Update(NamedTuple):
    """The update x -> (x @ down) @ up of a module."""

    down: Tensor
    """[inputs, rank]."""
    up: Tensor
    """[rank, rows], with the scale."""


@dataclass(frozen=True)
class Adapter:
    """An adapter that fits a model; its weights are not read yet."""

    checkpoint: Checkpoint = field(repr=False)
    modules: Mapping[str, AdapterModule]
    """By the name of the module in the checkpoint, in ascending order."""
    places: Mapping[str, Place] = field(repr=False)
    """Modules that adapters of this model may change, by name. Those of one layer are in the order of its rows."""

    def read(self) -> dict[str, Update]:
        """Return the updates by the name of the module, float32. Raises UserError for values that are not finite."""
        targets = {name: torch.empty(shape) for name, shape in _shapes(self.modules).items()}
        self.checkpoint.copy_into(targets)
        return {
            module: Update(targets[_weight_name(module, "A")].t(), targets[_weight_name(module, "B")].t() * scale)
            for module, (_, _, scale) in self.modules.items()
        }


def check_adapters(folders: Mapping[str, Path], config: ModelConfig) -> dict[str, Adapter]:
    """Return the adapters of folders, by name; no weights are read.

    Raises UserError, with the adapter's name, for a folder that is missing or damaged, that has what this engine does
    not support, or that belongs to another model.
    """
    if not folders:
        return {}
    decoder = on_meta_device(lambda: Decoder(config))
    places = adapter_places(decoder)
    adapters = {}
    for name, folder in folders.items():
        try:
            if not folder.is_dir():
                raise UserError(f"there is no folder {folder}; give one that PEFT's save_pretrained wrote")
            adapters[name] = _check_adapter(folder, places)
        except UserError as problem:
            raise UserError(f"--lora {name}: {problem}") from None
    return adapters


def adapter_places(decoder: Decoder) -> dict[str, Place]:
    """Return the modules of the checkpoint that adapters may change: the linear layers between embedding and output."""
    places = {}
    for name, layer in decoder.layers.named_modules(prefix="layers"):
        # Routers choose experts, and compute in another dtype than the other layers.
        if isinstance(layer, nn.Linear) and "router" not in name.split("."):
            for part, rows in checkpoint_parts(f"{name}.weight", decoder.config):
                places[part.removesuffix(".weight")] = Place(name, rows, layer.in_features)
    return places


def _check_adapter(folder: Path, places: Mapping[str, Place]) -> Adapter:
    """Return the adapter in a folder. Raises UserError."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).exists():
            raise UserError(f"{folder} has no {name}; save the adapter with save_pretrained of PEFT")
    fields = read_json(folder / ADAPTER_CONFIG)
    _check_config(fields)
    checkpoint = Checkpoint(folder, [folder / ADAPTER_WEIGHTS], config_file=ADAPTER_CONFIG)
    modules = {}
    for module in sorted(_modules(checkpoint, places)):
        rank = _by_pattern(fields, "r", "rank_pattern", module)
        alpha = _by_pattern(fields, "lora_alpha", "alpha_pattern", module)
        if type(rank) is not int or not 1 <= rank <= MAX_RANK:
            raise UserError(f"the rank of {module} is {rank!r}; adapters of rank 1 to {MAX_RANK} are supported")
        if type(alpha) not in (int, float) or not abs(alpha) <= MAX_ALPHA:
            raise UserError(f"{ADAPTER_CONFIG} has an invalid lora_alpha, {alpha!r}; download or copy it again")
        scale = alpha / (sqrt(rank) if fields.get("use_rslora") else rank)
        modules[module] = AdapterModule(places[module], rank, scale)
    checkpoint.check(_shapes(modules), is_redundant=lambda _: False)
    return Adapter(checkpoint, modules, places)


def _check_config(fields: Mapping[str, Any]) -> None:
    if fields.get("peft_type") != "LORA":
        raise UserError(f"{ADAPTER_CONFIG} has the peft_type {fields.get('peft_type')!r}; only LORA is supported")
    for setting, name in UNSUPPORTED.items():
        if fields.get(setting):
            raise UserError(f"{name} is not supported; train the adapter without {setting}")
    if fields.get("bias", "none") != "none":
        raise UserError(f"biases are not supported; train the adapter with bias 'none', not {fields['bias']!r}")
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.startswith(CHANGES_BASE):
        raise UserError(f"init_lora_weights {init!r} changes the base model; convert the adapter to LoRA with PEFT")


def _modules(checkpoint: Checkpoint, places: Mapping[str, Place]) -> set[str]:
    """Return the modules that the weights belong to. Raises UserError for a module that takes no adapter."""
    modules = set()
    for name in sorted(checkpoint.names()):
        module, separator, _ = name.removeprefix(PREFIX).partition(".lora_")
        if module not in places or not separator:
            kinds = ", ".join(dict.fromkeys(place.rsplit(".", 1)[1] for place in places))
            raise UserError(f"it has {name}; adapters may change only {kinds} of the model's layers")
        modules.add(module)
    if not modules:
        raise UserError(f"{ADAPTER_WEIGHTS} has no weights; download or copy it again")
    return modules


def _by_pattern(fields: Mapping[str, Any], name: str, pattern_name: str, module: str) -> Any:
    """Return a setting of a module: that of the first pattern that ends its name, as in PEFT, or the common one."""
    try:
        for pattern, value in (fields.get(pattern_name) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
    except (AttributeError, re.error) as problem:
        raise UserError(f"{ADAPTER_CONFIG} has an invalid {pattern_name} ({problem}); download it again") from None
    return fields.get(name)


def _shapes(modules: Mapping[str, AdapterModule]) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weights of modules by their names."""
    shapes = {}
    for module, (place, rank, _) in modules.items():
        shapes[_weight_name(module, "A")] = (rank, place.inputs)
        shapes[_weight_name(module, "B")] = (place.rows, rank)
    return shapes


def _weight_name(module: str, matrix: str) -> str:
    return f"{PREFIX}{module}.lora_{matrix}.weight"
