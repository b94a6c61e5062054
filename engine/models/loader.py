"""Load models from Hugging Face folders and GGUF files, and save them as folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drafter_service.client.gguf import is_gguf
from engine.models.checkpoint import CONFIG_FILE, WEIGHTS_FILE, Checkpoint, checkpoint_parts, weight_rows
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.families import config_from_hf
from engine.models.files import read_json
from engine.models.generation import GENERATION_FILE, load_generation_defaults
from engine.models.gguf_model import config_fields
from engine.models.heads.mtp_names import mtp_tensors
from engine.models.quantized.config import Quantization, read_quantization
from engine.models.quantized.linear import keep_quantized
from engine.models.quantized.storage import PARTS
from ssd.errors import UserError

M = TypeVar("M", bound=nn.Module)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes that a model can run in, independent of the dtype of the stored weights."""


def load_model(folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """Return a decoder with the weights of `folder`, or of a GGUF file, ready to run.

    Raises UserError for a missing or damaged file, for a config that does not match the weights, and for a model that
    cannot run in `dtype` on `device`.
    """
    config = load_config(folder)
    refuse_unsupported(config, dtype, device)
    checkpoint = model_checkpoint(folder)
    decoder = on_meta_device(lambda: Decoder(config))
    whole = shapes(checkpoint_views(decoder))
    checkpoint.check(whole, is_redundant=is_redundant_in(folder, config))
    decoder.to(dtype)
    if torch.device(device).type == "cpu":
        keep_quantized(decoder, whole, checkpoint.scheme)
    allocate(decoder, device)
    checkpoint.copy_into(checkpoint_views(decoder))
    return decoder.eval().requires_grad_(False)


def refuse_unsupported(config: ModelConfig, dtype: torch.dtype, device: str) -> None:
    """Raise UserError for a model that this engine cannot run in a dtype on a device."""
    if config.experts is not None and torch.device(device).type != "cpu" and dtype != torch.bfloat16:
        # PyTorch's grouped product reads the sizes of the groups on the host for other dtypes.
        raise UserError(
            f"a mixture of experts runs on {device!r} only as bfloat16, not {str(dtype).removeprefix('torch.')}; "
            "give --dtype bfloat16, or --device cpu"
        )


def model_checkpoint(folder: Path) -> Checkpoint:
    """Return the weight files of the model in `folder`. Raises UserError."""
    config_file = "the metadata" if is_gguf(folder) else CONFIG_FILE
    return Checkpoint(folder, quantization=load_quantization(folder), config_file=config_file)


def load_quantization(folder: Path) -> Quantization | None:
    """Return the quantization of the model in `folder`; None if its weights are floats. Raises UserError."""
    return read_quantization(read_fields(folder))


def is_redundant_in(folder: Path, config: ModelConfig) -> Callable[[str], bool]:
    """Return whether the files in `folder` may have a tensor of a name that the decoder does not read."""
    is_mtp = mtp_tensors(read_fields(folder))
    return lambda name: is_mtp(name) or (name.startswith("lm_head.") and config.tie_embeddings)


def on_meta_device(make: Callable[[], M]) -> M:
    """Return a module without weights, whose names, shapes and dtypes can be compared with those of a checkpoint."""
    with torch.device("meta"), _NoInitialization():
        return make()


def shapes(views: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors by their names."""
    return {name: tuple(tensor.shape) for name, tensor in views.items()}


class _NoInitialization(TorchFunctionMode):
    """Skips the initialization of parameters.

    On the meta device `nn.init.normal_` imports torch._dynamo, which is a third of the engine's start-up time.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def read_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of the `config.json` in `folder`, or those that a GGUF file describes. Raises UserError."""
    if is_gguf(folder):
        return config_fields(folder)
    if not folder.is_dir():
        raise UserError(
            f"there is no model folder {folder}; give a Hugging Face folder with {CONFIG_FILE}, or a GGUF file"
        )
    return read_json(folder / CONFIG_FILE)


def load_config(folder: Path) -> ModelConfig:
    """Return the shape of the model in `folder`. Raises UserError."""
    fields = read_fields(folder)
    try:
        config = config_from_hf(fields)
    except UserError as problem:
        raise UserError(str(problem).replace(CONFIG_FILE, str(folder), 1) if is_gguf(folder) else problem) from None
    # Chat models often name the token that ends a turn only in this file.
    more = load_generation_defaults(folder).eos_token_ids
    try:
        return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
    except ValueError as problem:
        raise UserError(
            f"{folder / GENERATION_FILE} has an invalid field: {problem}; download or copy it again"
        ) from None


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file. `save_file` of safetensors would let nobody but the owner read it."""
    path.write_bytes(save(dict(tensors), metadata={"format": "pt"}))


def save_model(
    decoder: Decoder, folder: Path, fields: Mapping[str, Any], *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config.json and model.safetensors in the format that transformers and `load_model` read.

    fields: those of a `config.json` of this shape, except the number of layers and the dtype.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in checkpoint_views(decoder).items()}
    write_tensors(tensors, folder / WEIGHTS_FILE)
    own = {"num_hidden_layers": decoder.config.num_layers, "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG_FILE).write_text(json.dumps({**fields, **own}, indent=2) + "\n")


def checkpoint_views(decoder: Decoder) -> dict[str, Tensor]:
    """Return writable views of the decoder's weights by their names in checkpoints.

    For layers that keep quantized weights, the names end in one of `PARTS` in place of "weight".
    """
    views: dict[str, Tensor] = {}
    for name, parameter in decoder.named_parameters():
        layer, _, kind = name.rpartition(".")
        is_part = kind in PARTS
        parts = checkpoint_parts(f"{layer}.weight" if is_part else name, decoder.config)
        rows = weight_rows(parameter).split([rows for _, rows in parts])
        for (part, _), view in zip(parts, rows, strict=True):
            views[part.removesuffix("weight") + kind if is_part else part] = view
    return views


def allocate(decoder: Decoder, device: str) -> None:
    """Allocate the weights of a decoder on the meta device, uninitialized, and compute its rope frequencies.

    Raises UserError if they do not fit into memory.
    """
    allocate_weights(decoder, device)
    decoder.tie()  # each name got a separate tensor
    decoder.frequencies = decoder.config.rope.frequencies(decoder.config.head_dim).repeat(2).to(device)


def allocate_weights(module: nn.Module, device: str) -> None:
    """Allocate the weights of a module on the meta device, uninitialized. Raises UserError if they do not fit."""
    try:
        # `to_empty` does the same with operators on the meta device, which import SymPy.
        memory = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            for name, tensor in module.state_dict().items()
        }
        module.load_state_dict(memory, assign=True)
    except RuntimeError as problem:
        if "memory" not in str(problem):
            raise
        size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        raise UserError(
            f"{size / (1 << 30):.1f} GiB of weights do not fit into the memory of {device!r}; "
            "load the model as bfloat16, or choose a smaller one"
        ) from None
