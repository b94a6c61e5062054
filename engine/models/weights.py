"""Overwrite the weights of a decoder that runs, as after a step of training.

All checks precede the first write. Tensors keep their addresses, which CUDA graphs hold; layers that keep their weight
in another form convert it again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.models.checkpoint import Checkpoint, TensorsInMemory, is_finite
from engine.models.decoder import Decoder
from engine.models.experts import LinearPerExpert
from engine.models.families import checkpoint_parts, mtp_layers, mtp_tensors
from engine.models.loader import check_checkpoint, checkpoint_views, on_meta_device, shapes
from engine.models.lora.pool import LoraLinear
from engine.models.packed import Int8Linear, PackedLinear
from engine.models.sharding import ShardedDecoder
from ssd.errors import UserError

Source = Mapping[str, Tensor] | Path | str
"""A state dict with the names of a checkpoint, a safetensors file, or a folder with such files."""


def check_weights(decoder: Decoder, source: Source) -> Checkpoint:
    """Return the weights of `source` if a decoder can take them; nothing is overwritten.

    Tensors of MTP layers are not read; see `check_checkpoint` for the output projection. Raises UserError for a missing
    or damaged file, for names, shapes or dtypes that are not those of the decoder, for values that are not finite in
    the dtype that it runs in, and for a decoder whose weights cannot be overwritten.
    """
    _refuse_fixed(decoder)
    weights = _opened(source)
    plain, config = _plain(decoder), decoder.config
    views = checkpoint_views(plain)
    names = weights.names()
    is_mtp = mtp_tensors({"num_hidden_layers": config.num_layers, "num_nextn_predict_layers": len(mtp_layers(names))})
    check_checkpoint(weights, shapes(views), config, is_mtp)
    for name, view in views.items():
        if not is_finite(weights.read(name).to(view.dtype)):
            raise UserError(
                f"{name} has values that are not finite as {str(view.dtype).removeprefix('torch.')}, so the engine "
                "keeps its weights; check the training step that they are from"
            )
    return weights


@torch.no_grad()
def overwrite_weights(decoder: Decoder, weights: Checkpoint) -> None:
    """Overwrite the weights of a decoder, packed, rounded to int8 or neither, with those that `check_weights` returned.

    LoRA adapters that are attached to it stay.
    """
    for name, parameter in _plain(decoder).named_parameters():
        path, _, kind = name.rpartition(".")
        whole = torch.cat([weights.read(part) for part, _ in checkpoint_parts(name, decoder.config)])
        module = decoder.get_submodule(path)
        _assign(module.base if isinstance(module, LoraLinear) else module, kind, whole.to(parameter.dtype))
    if decoder.config.tie_embeddings:
        _assign(decoder.lm_head, "weight", decoder.embedding.weight)


def _assign(module: nn.Module, kind: str, rows: Tensor) -> None:
    """Overwrite the weight or the bias of a module; rows: that of all experts is [experts * out, in]."""
    own = getattr(module, kind, None)
    if isinstance(own, Tensor):
        own.copy_(rows.view_as(own))
    elif isinstance(module, LinearPerExpert):
        for layer, part in zip(module.layers, rows.chunk(module.count), strict=True):
            _assign(layer, kind, part)
    else:
        assert isinstance(module, PackedLinear | Int8Linear)
        module.overwrite(rows)


def _plain(decoder: Decoder) -> Decoder:
    """Return a decoder without weights whose parameters have the names, shapes and dtypes of an unpacked one."""
    return on_meta_device(lambda: Decoder(decoder.config)).to(decoder.embedding.weight.dtype)


def _opened(source: Source) -> Checkpoint:
    if isinstance(source, Mapping):
        return _state_dict(source)
    path = Path(source)
    # Unlike the methods of `Path`, these accept names that no file can have.
    if os.path.isdir(path):
        try:
            return Checkpoint(path)
        except OSError as problem:
            raise UserError(f"{path} cannot be read ({problem.strerror}); change its permissions") from None
    if path.suffix == ".safetensors" and os.path.isfile(path):
        return Checkpoint(path, [path])
    raise UserError(f"{path} is neither a folder nor a .safetensors file that can be read; give one of these")


def _state_dict(tensors: Mapping[str, Tensor]) -> Checkpoint:
    origin = Path("the state dict")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise UserError(f"{name} in {origin} is a {type(tensor).__name__}, not a tensor; give tensors")
    advice = "give all tensors of the model, by the names of its checkpoint"
    return Checkpoint(origin, [TensorsInMemory(origin, tensors)], advice=advice)


def _refuse_fixed(decoder: Decoder) -> None:
    if isinstance(decoder, ShardedDecoder):
        raise UserError(
            "the weights of a model that --tensor-parallel divides cannot be changed while it runs; start the engine "
            "again with the new ones"
        )
