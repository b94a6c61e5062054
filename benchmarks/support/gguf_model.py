"""Write a model folder as a GGUF file, which llama.cpp loads. Needs the package gguf."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map, quantize
from safetensors.torch import load_file


def write_gguf(
    folder: Path,
    file: Path,
    *,
    tokens: list[str] | None = None,
    pre: str = "llama-bpe",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    extend: Callable[[GGUFWriter], None] = lambda _: None,
) -> None:
    """Write a model folder of the families Llama, Qwen2 or Qwen3 as GGUF.

    tokens: texts of the vocabulary, instead of the tokenizer's; an empty list: no vocabulary. pre: name of the
    pre-tokenizer. kind: of matrices; vectors are float32. extend: adds metadata and tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(file, config["model_type"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    add_vocabulary(writer, folder, tokens, pre)
    extend(writer)
    architecture = next(each for each, name in MODEL_ARCH_NAMES.items() if name == config["model_type"])
    names = get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        weight = tensor.float().numpy()
        if config["model_type"] == "llama":
            weight = in_rotary_order(name, weight, head_dim)
        stored = kind if weight.ndim == 2 else GGMLQuantizationType.F32
        own_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own_name is not None
        writer.add_tensor(own_name, quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: GGUFWriter, folder: Path, tokens: list[str] | None, pre: str) -> None:
    """Add the vocabulary and the merges of a byte-level BPE tokenizer."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = tokens_of(folder) if tokens is None else tokens
    if not tokens:
        writer.add_tokenizer_model("no_vocab")
        return
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if at in special else TokenType.NORMAL for at in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(min(special))
    writer.add_add_bos_token(False)


def tokens_of(folder: Path) -> list[str]:
    """Return the texts of the vocabulary of a model folder, by token id."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(vocabulary, key=vocabulary.__getitem__)


def in_rotary_order(name: str, weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Return a weight as llama.cpp expects it: it rotates neighbouring rows of q and k, not the halves of a head."""
    if "q_proj" not in name and "k_proj" not in name:
        return weight
    halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
