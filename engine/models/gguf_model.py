"""Load a model from a GGUF file: its shape as fields of a `config.json`, and its weights by the names of Hugging Face.

Quantized weights are dequantized one at a time, exactly as llama.cpp and transformers define them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafter_service.client.gguf import GgufFile, open_gguf
from engine.models.families import FAMILIES
from engine.models.quantization import Header
from engine.models.rope import Llama3, Rope
from ssd.errors import UserError

ARCHITECTURES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}
"""Supported architectures, with their names in a `config.json`."""
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of the parts of a layer, in a GGUF file and in a folder."""
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, float32 [head_dim / 2]."""
LLAMA3_RANGE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""Parameters of scaling in all known models with `ROPE_FACTORS`. A GGUF file has only the result, which is compared."""


def config_fields(path: Path) -> dict[str, Any]:
    """Return the model in a GGUF file as the fields of a `config.json`.

    Raises UserError for another architecture, and for features that the engine does not have.
    """
    file = open_gguf(path)
    kind = file.field("general.architecture")
    if kind not in ARCHITECTURES:
        raise UserError(
            f"{path} has the architecture {kind!r}, which this engine does not read from GGUF; "
            f"give a file with one of {', '.join(ARCHITECTURES)}, or the model's folder"
        )
    values = {key.removeprefix(f"{kind}."): value for key, value in file.metadata.items() if key.startswith(f"{kind}.")}
    if values.get("expert_count"):
        raise UserError(f"{path} has experts, which this engine does not read from GGUF; give the model's folder")

    def number(name: str) -> Any:
        value = file.field(f"{kind}.{name}")
        if isinstance(value, list):
            raise UserError(f"{path} has a {kind}.{name} for each layer; this engine supports only one")
        return value

    heads, hidden, positions = number("attention.head_count"), number("embedding_length"), number("context_length")
    head_dim = values.get("attention.key_length") or hidden // max(1, heads)
    if {values.get(name, head_dim) for name in ("attention.value_length", "rope.dimension_count")} != {head_dim}:
        raise UserError(
            f"{path} has values, or a rotated part, that are not as wide as keys; this engine supports only one width"
        )
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{path} has no token_embd.weight; is it a whole model?")
    return {
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        # A layer with a sliding window attends to all tokens as long as there are no more than its width.
        "max_position_embeddings": min(positions, values.get("attention.sliding_window") or positions),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": values.get("rope.freq_base", 10_000.0)} | _scaling(file, values, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "bos_token_id": file.token_id("bos"),
        "eos_token_id": [token for role in ("eos", "eot", "eom") if (token := file.token_id(role)) is not None],
    }


def _scaling(file: GgufFile, values: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the scaling of rotary frequencies as fields of `rope_parameters`. Raises UserError."""
    if ROPE_FACTORS in file.tensors:
        factors = torch.from_numpy(np.array(file.tensors[ROPE_FACTORS].data, np.float32))
        fields: dict[str, Any] = {"factor": float(factors.max()), **LLAMA3_RANGE}
        plain = Rope(values.get("rope.freq_base", 10_000.0)).frequencies(head_dim)
        if factors.shape != plain.shape or not torch.allclose(
            plain / factors, Llama3(**fields).scale(plain, 0.0), rtol=1e-4
        ):
            raise UserError(f"{file.path} scales rotary frequencies in a way that this engine does not know")
        return {"rope_type": "llama3", **fields}
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        factor = values.get("rope.scale_linear", 1.0)
        return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if values.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UserError(f"{file.path} scales attention with rotary embeddings, which this engine does not support")
    original = values.get("rope.scaling.original_context_length")
    window = {} if original is None else {"original_max_position_embeddings": original}
    return {"rope_type": kind, "factor": values.get("rope.scaling.factor"), **window}


class GgufTensors:
    """The tensors of a GGUF file by their names in a folder; see `checkpoint.Tensors`."""

    def __init__(self, path: Path) -> None:
        """Raise UserError for a file that cannot be read."""
        self._file = open_gguf(path)
        self._names = {_folder_name(name): name for name in self._file.tensors if name != ROPE_FACTORS}

    def headers(self) -> dict[str, Header]:
        """Return the headers of all tensors by their names, with the dtype in which values are returned."""
        shapes = {name: self._file.tensors[own].shape for name, own in self._names.items()}
        return {
            name: Header(self._file.path, "F32", tuple(int(size) for size in reversed(shape)))
            for name, shape in shapes.items()
        }

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a tensor, or its part at an index, as float32. Raises UserError for an unknown quantization."""
        from gguf import dequantize

        tensor = self._file.tensors[self._names[name]]
        rows = self._rotary_order(self._names[name], int(tensor.shape[-1]))[index[0] if index else slice(None)]
        try:
            values = dequantize(tensor.data[rows], tensor.tensor_type)
        except NotImplementedError:
            raise UserError(
                f"{self._names[name]} in {self._file.path} is stored as {tensor.tensor_type.name}, which the library "
                "gguf does not dequantize; give another quantization of the model"
            ) from None
        part = values[(slice(None), *index[1:])]
        return torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32))

    def _rotary_order(self, name: str, count: int) -> np.ndarray:
        """Return which row of the file each of `count` rows of a tensor is, int64 [count].

        Files of the architecture llama have the rows of queries and keys in another order, because llama.cpp rotates
        neighboring components together, not those of the two halves of a head.
        """
        rows = np.arange(count)
        kind = self._file.field("general.architecture")
        part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if kind != "llama" or part not in ("attn_q", "attn_k"):
            return rows
        heads = self._file.field(f"{kind}.attention.head_count")
        if part == "attn_k":
            heads = self._file.metadata.get(f"{kind}.attention.head_count_kv", heads)
        return rows.reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def _folder_name(name: str) -> str:
    """Return the name that a tensor of a GGUF file has in a folder; that name itself if it is not known."""
    part, _, kind = name.rpartition(".")
    if part in WHOLE:
        return f"{WHOLE[part]}.{kind}"
    block, _, suffix = part.removeprefix("blk.").partition(".")
    return f"model.layers.{block}.{PARTS[suffix]}.{kind}" if suffix in PARTS else name
