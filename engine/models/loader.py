"""Models in and out of Hugging Face folders: config.json, safetensors (whole or sharded).

Knows how checkpoints name their tensors; the decoder itself does not.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.models.config import ModelConfig, token_ids
from engine.models.decoder import Decoder, rope_tables
from ssd.errors import UserError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_model(folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """A decoder with the weights of `folder`, ready to run.

    Raises UserError for a folder that lacks a file, holds a damaged one, or describes another model than its weights.
    """
    config = load_config(folder)
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder = decoder.to(dtype).to_empty(device=device)
    decoder.tie()  # `to_empty` gave each its own memory
    decoder.cos, decoder.sin = (table.to(device) for table in rope_tables(config))
    _copy_weights(decoder, folder)
    return decoder.eval().requires_grad_(False)


def load_config(folder: Path) -> ModelConfig:
    """The shape of the model in `folder`. Raises UserError."""
    if not folder.is_dir():
        raise UserError(f"there is no model folder {folder}; give a Hugging Face folder with {CONFIG_FILE}")
    config = ModelConfig.from_hf(_read_json(folder / CONFIG_FILE))
    if not (folder / GENERATION_FILE).exists():
        return config
    # Chat models name the token that ends a turn only here.
    try:
        more = token_ids(_read_json(folder / GENERATION_FILE).get("eos_token_id"))
        return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
    except (TypeError, ValueError) as problem:
        raise UserError(f"{folder / GENERATION_FILE} holds a field that cannot be: {problem}") from None


def save_model(decoder: Decoder, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors as transformers and `load_model` read them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, parameter in decoder.named_parameters():
        parts = checkpoint_parts(name, decoder.config)
        for (part, rows), tensor in zip(parts, parameter.detach().split([rows for _, rows in parts]), strict=True):
            if tensor.shape[0] != rows:
                raise AssertionError(f"{part} has {tensor.shape[0]} rows, not {rows}")
            tensors[part] = tensor.to(dtype).contiguous()
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(
        json.dumps(decoder.config.to_hf(str(dtype).removeprefix("torch.")), indent=2) + "\n"
    )


def checkpoint_parts(name: str, config: ModelConfig) -> list[tuple[str, int]]:
    """The checkpoint's tensors, with their rows, that lie one below the other in the decoder's parameter `name`."""
    whole = {
        "embedding.weight": ("model.embed_tokens.weight", config.vocab_size),
        "norm.weight": ("model.norm.weight", config.hidden_size),
        "lm_head.weight": ("lm_head.weight", config.vocab_size),
    }
    if name in whole:
        return [whole[name]]
    _, layer, part, _ = name.split(".")
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {
        "input_norm": [("input_layernorm", config.hidden_size)],
        "qkv_proj": [("self_attn.q_proj", heads), ("self_attn.k_proj", kv_heads), ("self_attn.v_proj", kv_heads)],
        "o_proj": [("self_attn.o_proj", config.hidden_size)],
        "mlp_norm": [("post_attention_layernorm", config.hidden_size)],
        "gate_up_proj": [("mlp.gate_proj", config.intermediate_size), ("mlp.up_proj", config.intermediate_size)],
        "down_proj": [("mlp.down_proj", config.hidden_size)],
    }
    return [(f"model.layers.{layer}.{suffix}.weight", rows) for suffix, rows in parts[part]]


def _copy_weights(decoder: Decoder, folder: Path) -> None:
    wanted: dict[str, Tensor] = {}
    for name, parameter in decoder.named_parameters():
        parts = checkpoint_parts(name, decoder.config)
        views = parameter.data.split([rows for _, rows in parts])
        wanted.update((part, view) for (part, _), view in zip(parts, views, strict=True))
    missing = set(wanted)
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                _refuse_unknown(set(file.keys()) - set(wanted), decoder.config, path)
                for name in set(file.keys()) & missing:
                    _copy(file.get_tensor(name), wanted[name], name, path)
                    missing.remove(name)
        except (SafetensorError, OSError) as problem:
            raise UserError(f"{path} is damaged or cut short ({problem}); download or copy it again") from None
    if missing:
        raise UserError(f"{folder} lacks the weights of {sorted(missing)[0]} and {len(missing) - 1} more tensors")


def _refuse_unknown(names: set[str], config: ModelConfig, path: Path) -> None:
    """Refuse weights that would be left out: the logits would be those of another model."""
    for name in sorted(names):
        is_table = name.endswith("rotary_emb.inv_freq")
        is_tied = name == "lm_head.weight" and config.tie_embeddings
        if not (is_table or is_tied):
            raise UserError(f"{path} holds {name}, which {CONFIG_FILE} says nothing of; do they belong together?")


def _copy(source: Tensor, target: Tensor, name: str, path: Path) -> None:
    if source.shape != target.shape:
        raise UserError(
            f"{name} in {path} has shape {tuple(source.shape)}, but {CONFIG_FILE} describes {tuple(target.shape)}"
        )
    if source.dtype not in FLOATS:
        raise UserError(f"{name} in {path} is stored as {source.dtype}; this engine reads float weights alone")
    target.copy_(source)


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index, or the only one."""
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        path = folder / WEIGHTS_FILE
        if not path.exists():
            raise UserError(f"{folder} has no {WEIGHTS_FILE}; only safetensors weights are read")
        return [path]
    weight_map = _read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{index_path} has no weight_map; download or copy it again")
    paths = [folder / file for file in sorted(set(weight_map.values()))]
    for path in paths:
        if not path.exists():
            raise UserError(f"{folder} has no {path.name}, which {INDEX_FILE} names; download or copy it again")
    return paths


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}; is it a Hugging Face model folder?") from None
    except (OSError, ValueError) as problem:
        raise UserError(f"{path} cannot be read ({problem}); download or copy it again") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} holds no JSON object; download or copy it again")
    return fields
