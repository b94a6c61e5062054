"""Read the weights of a model folder from one or several files.

Names, shapes and dtypes are checked in the headers of all files before the first weight is read.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from drafter_service.client.gguf import is_gguf
from engine.models.families import Parts
from engine.models.folders import read_json
from engine.models.gguf_model import GgufTensors
from engine.models.quantization import (
    FLOATS,
    Header,
    Quantization,
    Scheme,
    StoredTensor,
    dequantize,
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


def part_views(parameter: nn.Parameter, parts: Parts) -> dict[str, Tensor]:
    """Return writable views of the rows of a parameter, by the names of the tensors that it concatenates."""
    weight = parameter.detach()
    rows = weight.view(-1, weight.shape[-1]) if weight.ndim == 3 else weight
    return {name: view for (name, _), view in zip(parts, rows.split([size for _, size in parts]), strict=True)}


class Tensors(Protocol):
    """A container of tensors."""

    def headers(self) -> dict[str, Header]:
        """Return the headers of all tensors by their names. Raises UserError for a damaged file."""
        ...

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a tensor as it is stored, or the part of it at `index`."""
        ...


class SafetensorsFile:
    """A safetensors file, which is mapped anew for each tensor, so that the pages of the previous one are freed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def headers(self) -> dict[str, Header]:
        """See `Tensors.headers`."""
        with self._open() as file:
            slices = {name: file.get_slice(name) for name in list(file.keys())}
            return {
                name: Header(self._path, each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()
            }

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """See `Tensors.read`."""
        with self._open() as file:
            tensor: Tensor = file.get_slice(name)[index] if index else file.get_tensor(name)
        return tensor

    @contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            with safe_open(self._path, framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as problem:
            raise UserError(f"{self._path} is damaged or cut short ({problem}); download or copy it again") from None


class TensorsInMemory:
    """Tensors of a state dict or of an unpickled file."""

    def __init__(self, origin: Path, tensors: Mapping[str, Tensor]) -> None:
        """origin: name of the container in errors."""
        self._origin = origin
        self._tensors = tensors

    def headers(self) -> dict[str, Header]:
        """See `Tensors.headers`."""
        return {
            name: Header(
                self._origin,
                _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
                tuple(tensor.shape),
            )
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """See `Tensors.read`."""
        return self._tensors[name][index]


def unpickle(path: Path, advice: str, *, mmap: bool = False) -> Any:
    """Return what `torch.save` wrote to a file: tensors and plain values only, so that reading it cannot run code.

    advice: what to do about a damaged file, for which this raises UserError.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as problem:  # damaged bytes may raise any, such as AssertionError and UnicodeDecodeError
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise UserError(f"{path} cannot be read ({reason}); {advice}") from None


def _unpickled(path: Path) -> TensorsInMemory:
    """Return the tensors of a file that `torch.save` wrote. Raises UserError if it contains more than tensors."""
    # Files in the format of PyTorch before 1.6 are no archives, and cannot be mapped.
    loaded = unpickle(path, "download or copy it again", mmap=zipfile.is_zipfile(path))
    if not isinstance(loaded, dict) or not all(isinstance(each, Tensor) for each in loaded.values()):
        raise UserError(f"{path} is not a dictionary of tensors; give the weights of one model")
    return TensorsInMemory(path, loaded)


class Checkpoint:
    """Weights of a model, a head or an adapter in one or several containers."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[Path | Tensors] | None = None,
        quantization: Quantization | None = None,
        config_file: str = CONFIG_FILE,
        advice: str = "download or copy the folder again",
    ) -> None:
        """files: by default those of a model. quantization: None if no weight is quantized. config_file: name of the
        file that describes the weights, for errors. advice: what to do if a tensor is missing.

        Raises UserError if files are missing.
        """
        self._folder = folder
        self._quantization = quantization
        self._config_file = config_file
        self._advice = advice
        self._files = weight_files(folder) if files is None else files

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

        part: returns one slice per dimension, with start and stop, for the part of a weight that its target takes. Only
        that part is read, except of quantized weights, which are read whole, one at a time. None: all.
        At most one weight is in memory besides the targets.
        """
        for name in sorted(targets, key=self._position):
            target = targets[name]
            target.copy_(self.read(name, () if part is None else part(name)))
            _refuse_non_finite(target, name, self._headers[name].path if name in self._headers else self._folder)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a tensor of any dtype, or the part of it at `index`; a quantized weight is dequantized.

        Raises UserError if there is none.
        """
        scheme = self.scheme(name)
        if scheme is not None:
            shape = self._stored_shape(name, scheme)
            tensors = {each: self._raw(each) for each in stored_tensors(name, shape, scheme)}
            return dequantize(tensors, name, shape, scheme)[index]
        if name not in self._headers:
            raise UserError(f"{self._folder} lacks {name}; {self._advice}")
        return self._raw(name, index)

    def _stored_shape(self, name: str, scheme: Scheme) -> tuple[int, ...]:
        return tuple(self._raw(name + "_shape").tolist()) if scheme.values == "packed" else self._headers[name].shape

    def _raw(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a tensor as it is stored, or the part of it at `index`."""
        return self._found[name][0].read(name, index)

    def _position(self, name: str) -> tuple[str, str]:
        """Return the file and the name of a weight, by which to sort weights so that each file is read in one go."""
        found = next((self._headers[each] for each in (name, name + "_packed") if each in self._headers), None)
        return "" if found is None else str(found.path), name

    @cached_property
    def _found(self) -> dict[str, tuple[Tensors, Header]]:
        opened = [_opened(file) if isinstance(file, Path) else file for file in self._files]
        return {name: (file, header) for file in opened for name, header in file.headers().items()}

    @cached_property
    def _headers(self) -> dict[str, Header]:
        return {name: header for name, (_, header) in self._found.items()}


def _opened(path: Path) -> Tensors:
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    return GgufTensors(path) if is_gguf(path) else _unpickled(path)


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


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files: the single file, those listed in the index if there is none, or a GGUF file itself.

    Raises UserError.
    """
    if is_gguf(folder):
        return [folder]
    single, index_path = folder / WEIGHTS_FILE, folder / INDEX_FILE
    # As in transformers, whose `save_pretrained` writes a single file and leaves the index of an earlier model.
    if single.exists():
        return [single]
    if not index_path.exists():
        raise UserError(
            f"{folder} has no {WEIGHTS_FILE}; only safetensors weights are read, "
            "which transformers writes with save_pretrained"
        )
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{index_path} has no weight_map; download or copy it again")
    paths = [folder / file for file in sorted(set(weight_map.values()))]
    for path in paths:
        if not path.exists():
            raise UserError(f"{folder} has no {path.name}, which {INDEX_FILE} names; download or copy it again")
    return paths
