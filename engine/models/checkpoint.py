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
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from drafter_service.client.gguf import is_gguf
from engine.models.config import ModelConfig
from engine.models.expert_fields import expert_parts
from engine.models.files import read_json
from engine.models.gguf_model import GgufTensors
from engine.models.latent_fields import latent_parts
from engine.models.quantized.config import Quantization, Scheme
from engine.models.quantized.storage import (
    FLOATS,
    PARTS,
    QuantizedWeight,
    StoredTensor,
    assemble,
    has_nan,
    stored_tensors,
    weight_name,
)
from ssd.errors import UserError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ROUNDED = (".input_scale", ".input_zero_point", ".output_scale", ".kv_scale", ".k_scale", ".v_scale")
"""Suffixes of tensors for rounding activations and KV caches, which are not read; see `Quantization.notices`."""

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


class Header(NamedTuple):
    """Header of a tensor in a file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """Weight files of a folder."""

    _advice = "download or copy the folder again"
    """What to do if a tensor is missing."""

    def __init__(
        self,
        folder: Path,
        paths: Sequence[Path] | None = None,
        quantization: Quantization | None = None,
        config_file: str = CONFIG_FILE,
    ) -> None:
        """paths: the files, by default those of a model. quantization: None if no weight is quantized. config_file:
        name of the file that describes the weights, for errors.

        Raises UserError if files are missing.
        """
        self._folder = folder
        self._quantization = quantization
        self._config_file = config_file
        self._paths = weight_files(folder) if paths is None else paths

    def names(self) -> set[str]:
        """Return the names of all tensors. Raises UserError for a damaged file."""
        return set(self._headers)

    def scheme(self, name: str) -> Scheme | None:
        """Return how the weight `name` is stored; None for floats, even in a layer of a class that is quantized."""
        if self._quantization is None or (name in self._headers and self._headers[name].dtype in FLOATS):
            return None
        return self._quantization.scheme(name)

    def check(self, wanted: Shapes, *, is_redundant: Callable[[str], bool]) -> None:
        """Raise UserError unless the files have exactly the tensors `wanted`, as floats of those shapes or quantized.

        Scales are read and must be finite. is_redundant: whether the files may have a further weight of a name; it is
        not read.
        """
        schemes = {name: scheme for name in wanted if (scheme := self.scheme(name)) is not None}
        required = {name: StoredTensor(FLOATS, (shape,)) for name, shape in wanted.items() if name not in schemes}
        for name, scheme in schemes.items():
            required |= stored_tensors(name, wanted[name], scheme)
        ignored = ("rotary_emb.inv_freq", *(ROUNDED if self._quantization else ()))
        for name, header in sorted(self._headers.items()):
            if name in required:
                _check_header(header, required[name], name, self._config_file)
            elif not (is_redundant(weight_name(name)) or name.endswith(ignored)):
                # Ignoring this tensor would silently compute a different model.
                raise UserError(
                    f"{header.path} has the tensor {name}, which {self._config_file} does not describe; "
                    "are both of the same model?"
                )
        if missing := sorted(set(required) - set(self._headers)):
            more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
            raise UserError(f"{self._folder} lacks {missing[0]}{more}; {self._advice}")
        for name, scheme in schemes.items():
            self._check_quantized(name, wanted[name], scheme)

    def _check_quantized(self, name: str, shape: tuple[int, ...], scheme: Scheme) -> None:
        """Check the scales of a weight, and the shape that is stored with a packed one."""
        scales = name.removesuffix("weight") + scheme.scales
        _refuse_non_finite(self._raw(scales), scales, self._headers[scales].path)
        stored = self._stored_shape(name, scheme)
        if stored != shape:
            raise UserError(
                f"{name}_shape in {self._headers[name + '_shape'].path} is {stored}, but {self._config_file} describes "
                f"{shape}; are both of the same model?"
            )

    def copy_into(self, targets: Mapping[str, Tensor], part: Callable[[str], tuple[slice, ...]] | None = None) -> None:
        """Fill tensors one at a time from files that `check` accepted. Raises UserError for non-finite weights.

        Quantized weights are dequantized for a target with the name of the weight. The targets of a layer that keeps
        them end in one of `PARTS` in place of "weight".

        part: returns one slice per dimension, with start and stop, for the part of a weight that its target takes. Only
        that part is read, except of quantized weights, which are read whole, one at a time. None: all.
        The file is mapped again for each tensor, which frees the pages of the previous one, so that at most one weight
        is in memory besides the targets.
        """
        by_weight: dict[str, dict[str, Tensor]] = {}
        for name, target in targets.items():
            layer, _, kind = name.rpartition(".")
            by_weight.setdefault(f"{layer}.weight" if kind in PARTS else name, {})[kind] = target
        for name in sorted(by_weight, key=self._position):
            index = () if part is None else part(name)
            scheme = self.scheme(name)
            if scheme is not None:
                self._copy_quantized(by_weight[name], name, index, scheme)
            elif name in self._headers:
                (target,) = by_weight[name].values()
                target.copy_(self._raw(name, index))
                _refuse_non_finite(target, name, self._headers[name].path)

    def _copy_quantized(
        self, targets: Mapping[str, Tensor], name: str, index: tuple[slice, ...], scheme: Scheme
    ) -> None:
        weight = self._quantized(name, scheme, index)
        for kind, target in targets.items():
            if kind in PARTS:
                target.copy_(getattr(weight, kind))
            else:
                target.copy_(weight.dequantize())
                _refuse_non_finite(target, name, self._folder)

    def read(self, name: str) -> Tensor:
        """Return a tensor of any dtype, a quantized weight dequantized. Raises UserError if there is none."""
        scheme = self.scheme(name)
        if scheme is not None:
            return self._quantized(name, scheme).dequantize()
        if name not in self._headers:
            raise UserError(f"{self._folder} lacks {name}; {self._advice}")
        return self._raw(name)

    def _quantized(self, name: str, scheme: Scheme, index: tuple[slice, ...] = ()) -> QuantizedWeight:
        """Return a quantized weight, or the part of it at `index`. Raises UserError if values are not numbers."""
        shape = self._stored_shape(name, scheme)
        tensors = {each: self._raw(each) for each in stored_tensors(name, shape, scheme)}
        weight = assemble(tensors, name, shape, scheme).part(index)
        if has_nan(weight.values):
            raise UserError(f"{name} in {self._folder} has values that are not numbers; download or copy it again")
        return weight

    def _stored_shape(self, name: str, scheme: Scheme) -> tuple[int, ...]:
        return tuple(self._raw(name + "_shape").tolist()) if scheme.values == "packed" else self._headers[name].shape

    def _raw(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a tensor as it is stored, or the part of it at `index`."""
        with _open(self._headers[name].path) as file:
            tensor: Tensor = file.get_slice(name)[index] if index else file.get_tensor(name)
        return tensor

    def _position(self, name: str) -> tuple[str, str]:
        """Return the file and the name of a weight, by which to sort weights so that each file is read in one go."""
        found = next((self._headers[each] for each in (name, name + "_packed") if each in self._headers), None)
        return "" if found is None else str(found.path), name

    @cached_property
    def _headers(self) -> dict[str, Header]:
        found: dict[str, Header] = {}
        for path in self._paths:
            with _open(path) as file:
                for name in list(file.keys()):
                    header = file.get_slice(name)
                    found[name] = Header(path, header.get_dtype(), tuple(header.get_shape()))
        return found


def _check_header(header: Header, required: StoredTensor, name: str, config_file: str) -> None:
    if header.dtype not in required.dtypes:
        readable = "only float weights" if required.dtypes == FLOATS else " or ".join(required.dtypes) + " here"
        raise UserError(
            f"{name} in {header.path} is stored as {header.dtype}; this engine reads {readable}, so "
            "give the folder of the same model in bfloat16 or float32"
        )
    if header.shape not in required.shapes:
        raise UserError(
            f"{name} in {header.path} has shape {header.shape}, but {config_file} describes {required.shapes[-1]}; "
            "are both of the same model?"
        )


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite."""
    lowest, highest = torch.aminmax(tensor)  # needs no mask as large as the tensor; propagates NaN
    return bool(torch.isfinite(lowest) and torch.isfinite(highest))


def _refuse_non_finite(tensor: Tensor, name: str, path: Path) -> None:
    if not is_finite(tensor):
        raise UserError(
            f"{name} in {path} has values that are not finite as {str(tensor.dtype).removeprefix('torch.')}; "
            "download or copy it again, or load the model as float32"
        )


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    if path.suffix != ".safetensors":
        yield GgufTensors(path) if is_gguf(path) else PickledTensors(path)
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
    """Return the weight files: those listed in the index, the single file without an index, or a GGUF file itself.

    Raises UserError.
    """
    if is_gguf(folder):
        return [folder]
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
