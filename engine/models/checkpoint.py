"""Read the weights of a model folder from one or several files.

Names, shapes and dtypes are checked in the headers of all files before the first weight is read.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.expert_fields import expert_parts
from engine.models.files import read_json
from engine.models.fp8 import SCALE, STORED, Block, dequantize, scale_shape
from engine.models.latent_fields import latent_parts
from ssd.errors import UserError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "BF16", "F16")
"""Supported dtypes, by their names in safetensors headers."""

_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Shapes = Mapping[str, tuple[int, ...]]


def checkpoint_parts(name: str, config: ModelConfig) -> list[tuple[str, int]]:
    """Return names and rows of the checkpoint's tensors that the decoder's parameter `name` concatenates."""
    whole = {
        "embedding.weight": ("model.embed_tokens.weight", config.vocab_size),
        "norm.weight": ("model.norm.weight", config.hidden_size),
        "lm_head.weight": ("lm_head.weight", config.vocab_size),
    }
    if name in whole:
        return [whole[name]]
    _, layer, part = name.split(".", 2)
    return [(f"model.layers.{layer}.{suffix}", rows) for suffix, rows in layer_parts(part, config)]


def layer_parts(name: str, config: ModelConfig) -> list[tuple[str, int]]:
    """Return names within a layer, and rows, of the tensors that the parameter `name` of a `Layer` concatenates.

    The rows of stacked weights, [experts, out, in], are those of [experts * out, in].
    """
    if name.startswith(("feed_forward.router.", "feed_forward.experts.", "feed_forward.shared.")):
        return expert_parts(name.removeprefix("feed_forward."), config)
    if config.latent is not None and name.startswith("attention."):
        return latent_parts(name.removeprefix("attention."), config)
    part, _, kind = name.rpartition(".")
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {
        "input_norm": [("input_layernorm", config.hidden_size)],
        "attention.qkv_proj": [
            ("self_attn.q_proj", heads),
            ("self_attn.k_proj", kv_heads),
            ("self_attn.v_proj", kv_heads),
        ],
        "attention.qk_norm.query": [("self_attn.q_norm", config.head_dim)],
        "attention.qk_norm.key": [("self_attn.k_norm", config.head_dim)],
        "attention.o_proj": [("self_attn.o_proj", config.hidden_size)],
        "mlp_norm": [("post_attention_layernorm", config.hidden_size)],
        "feed_forward.gate_up_proj": [(f"mlp.{half}_proj", config.intermediate_size) for half in ("gate", "up")],
        "feed_forward.down_proj": [("mlp.down_proj", config.hidden_size)],
    }
    return [(f"{suffix}.{kind}", rows) for suffix, rows in parts[part]]


def weight_rows(parameter: nn.Parameter) -> Tensor:
    """Return a writable view of a weight whose first dimension is that of its rows, see `layer_parts`."""
    weight = parameter.detach()
    return weight.view(-1, weight.shape[-1]) if weight.ndim == 3 else weight


class Checkpoint:
    """Weight files of a folder."""

    def __init__(self, folder: Path, paths: Sequence[Path] | None = None, block: Block | None = None) -> None:
        """paths: the files, by default those of a model. block: see `fp8_block`.

        Raises UserError if files are missing.
        """
        self._folder = folder
        self._block = block
        self._paths = weight_files(folder) if paths is None else paths

    def names(self) -> set[str]:
        """Return the names of all tensors. Raises UserError for a damaged file."""
        return set(self._locations)

    def check(self, wanted: Shapes, *, is_redundant: Callable[[str], bool]) -> None:
        """Raise UserError unless the files have exactly the tensors `wanted`, as floats of those shapes.

        is_redundant: whether the files may have a further tensor of a name; it is not read.
        """
        missing = set(wanted)
        names = self.names() if self._block is not None else set()
        scales = {name + SCALE: name for name in wanted if name + SCALE in names}
        for path in self._paths:
            with _open(path) as file:
                for name in sorted(file.keys()):
                    if name in wanted:
                        dtypes = (STORED,) if name + SCALE in scales else FLOATS
                        _check_header(file.get_slice(name), wanted[name], name, path, dtypes)
                        missing.discard(name)
                    elif name in scales:
                        assert self._block is not None
                        shape = scale_shape(wanted[scales[name]], self._block)
                        _check_header(file.get_slice(name), shape, name, path)
                    elif not (is_redundant(name) or name.endswith("rotary_emb.inv_freq")):
                        # Ignoring this tensor would silently compute a different model.
                        raise UserError(
                            f"{path} has the tensor {name}, which {CONFIG_FILE} does not describe; "
                            "are both of the same model?"
                        )
        if missing:
            more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
            raise UserError(f"{self._folder} lacks {sorted(missing)[0]}{more}; download or copy the folder again")

    def copy_into(self, targets: Mapping[str, Tensor], part: Callable[[str], tuple[slice, ...]] | None = None) -> None:
        """Fill tensors one at a time from files that `check` accepted. Raises UserError for non-finite weights.

        part: returns one slice per dimension, with start and stop, for the part of a tensor that its target takes; only
        that part is read. None: all.
        The file is mapped again for each tensor, which frees the pages of the previous one, so that at most one tensor
        is in memory besides the targets.
        """
        for path in self._paths:
            with _open(path) as file:
                names = sorted(set(file.keys()) & set(targets))
            for name in names:
                with _open(path) as file:
                    targets[name].copy_(self._tensor(file, name, None if part is None else part(name)))
                _refuse_non_finite(targets[name], name, path)

    def read(self, name: str) -> Tensor:
        """Return a tensor of any dtype. Raises UserError if there is none of this name."""
        path = self._locations.get(name)
        if path is None:
            raise UserError(f"{self._folder} lacks {name}; download or copy the folder again")
        with _open(path) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def _tensor(self, file: Any, name: str, index: tuple[slice, ...] | None) -> Tensor:
        """Return a weight of an open file, or the part of it at `index`."""
        if self._block is not None and name + SCALE in self._locations:
            start = (0, 0) if index is None else (index[0].start, index[1].start)
            stored = file.get_tensor(name) if index is None else file.get_slice(name)[index]
            return dequantize(stored, self.read(name + SCALE), self._block, start)
        tensor: Tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
        return tensor

    @cached_property
    def _locations(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for path in self._paths:
            with _open(path) as file:
                found.update(dict.fromkeys(file.keys(), path))
        return found


def _check_header(header: Any, shape: tuple[int, ...], name: str, path: Path, dtypes: Sequence[str] = FLOATS) -> None:
    if header.get_dtype() not in dtypes:
        raise UserError(
            f"{name} in {path} is stored as {header.get_dtype()}; this engine reads only float weights, so "
            "give the folder of the same model in bfloat16 or float32"
        )
    if tuple(header.get_shape()) != shape:
        raise UserError(
            f"{name} in {path} has shape {tuple(header.get_shape())}, but {CONFIG_FILE} describes {shape}; "
            "are both of the same model?"
        )


def _refuse_non_finite(tensor: Tensor, name: str, path: Path) -> None:
    lowest, highest = torch.aminmax(tensor)  # needs no mask as large as the tensor; propagates NaN
    if not (torch.isfinite(lowest) and torch.isfinite(highest)):
        raise UserError(
            f"{name} in {path} has values that are not finite as {str(tensor.dtype).removeprefix('torch.')}; "
            "download or copy it again, or load the model as float32"
        )


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    if path.suffix != ".safetensors":
        yield PickledTensors(path)
        return
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as problem:
        raise UserError(f"{path} is damaged or cut short ({problem}); download or copy it again") from None


class PickledTensors:
    """A file that `torch.save` wrote, with the interface of an open safetensors file.

    Only tensors are unpickled, so a file cannot run code.
    """

    def __init__(self, path: Path) -> None:
        """Raise UserError for a damaged file, or for one that contains more than tensors."""
        try:
            # Files in the format of PyTorch before 1.6 are no archives, and cannot be mapped.
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, OSError) as problem:
            reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            raise UserError(f"{path} cannot be read ({reason}); download or copy it again") from None
        if not isinstance(loaded, dict) or not all(isinstance(each, Tensor) for each in loaded.values()):
            raise UserError(f"{path} is not a dictionary of tensors; give the weights of one model")
        self._tensors: dict[str, Tensor] = loaded

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> PickledHeader:
        """Return the dtype and shape of a tensor."""
        return PickledHeader(self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor."""
        return self._tensors[name]


class PickledHeader:
    """Dtype and shape of a tensor, in the form of safetensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_dtype(self) -> str:
        """Return the dtype by its name in safetensors headers."""
        return _DTYPE_NAMES.get(self._tensor.dtype, str(self._tensor.dtype).removeprefix("torch."))

    def get_shape(self) -> list[int]:
        """Return the size of each dimension."""
        return list(self._tensor.shape)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files: those listed in the index, or the single file without an index. Raises UserError."""
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        path = folder / WEIGHTS_FILE
        if not path.exists():
            raise UserError(
                f"{folder} has no {WEIGHTS_FILE}; only safetensors weights are read, "
                "which transformers writes with save_pretrained"
            )
        return [path]
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{index_path} has no weight_map; download or copy it again")
    paths = [folder / file for file in sorted(set(weight_map.values()))]
    for path in paths:
        if not path.exists():
            raise UserError(f"{folder} has no {path.name}, which {INDEX_FILE} names; download or copy it again")
    return paths
