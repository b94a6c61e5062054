"""Quantized weights: their description in `config.json`, and their names, shapes, dtypes and values in checkpoints.

Read are compressed-tensors, and fp8 as in DeepSeek-V3 or vLLM. A weight [out, in] is (values - zero points) * scales.

Formats: https://github.com/vllm-project/compressed-tensors, the fields of `QuantizationConfig` and `QuantizationArgs`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ssd.errors import UserError

Fields = Mapping[str, Any]

READABLE = (
    "compressed-tensors with weights of 8 bits (int-quantized, float-quantized, naive-quantized) or of 4 or 8 bits "
    "(pack-quantized), fp8, bfloat16, float16 and float32"
)
FLOATS = ("F64", "F32", "BF16", "F16")
"""Dtypes of weights that are not quantized, by their names in safetensors headers."""
Shape = tuple[int, ...]


class Scheme(NamedTuple):
    """How the weight [out, in] of a linear layer is stored."""

    values: Literal["int", "float", "packed"]
    """Values are int8, float8_e4m3fn, or integers of `bits` bits packed into int32."""
    bits: int
    block: tuple[int, int]
    """Rows and columns that share a scale; 0: all of them."""
    scales: str = "weight_scale"
    """Name of the scales within the layer."""
    has_zeros: bool = False
    """Whether there are zero points of the same blocks, which are subtracted from the values."""


@dataclass(frozen=True)
class Quantization:
    """The schemes of a checkpoint."""

    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    """Targets and their scheme. A target is a class or name of layers, or a regular expression behind `re:`."""
    ignored: tuple[str, ...] = ()
    """Names of layers, in the same form, that are not quantized."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """Properties of the checkpoint that this engine ignores, as sentences for users."""

    def scheme(self, name: str) -> Scheme | None:
        """Return the scheme of the tensor `name` of a checkpoint; None if it is not quantized."""
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or any(_precision(layer, target) for target in self.ignored):
            return None
        found = [(_precision(layer, target), scheme) for targets, scheme in self.groups for target in targets]
        precision, scheme = max(found, key=itemgetter(0), default=(0, None))
        return scheme if precision else None


def _precision(layer: str, target: str) -> int:
    """Return 0 if a target does not match a layer, or 1 to 3 for its class, an expression or its name.

    The group with the most precise target applies, as in `match_targets` of compressed-tensors.
    """
    if target == layer:
        return 3
    if target.startswith("re:"):
        return 2 if re.match(target.removeprefix("re:"), layer) else 0
    return 1 if target == ("Embedding" if layer.endswith("embed_tokens") else "Linear") else 0


def read_quantization(fields: Fields) -> Quantization | None:
    """Return the quantization that the fields of a `config.json` describe; None for weights that are not quantized.

    Raises UserError for any other one.
    """
    found = fields.get("quantization_config") or fields.get("compression_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise UserError("config.json has a quantization_config that is not an object; download or copy it again")
    method = str(found.get("quant_method"))
    readers = {"compressed-tensors": _compressed_tensors, "fp8": _fp8}
    if method not in readers:
        raise _refusal(f"({method!r})")
    try:
        return readers[method](found)
    except (AttributeError, KeyError, TypeError, ValueError, re.error) as problem:
        raise UserError(
            f"config.json has an invalid field in quantization_config: {problem}; download or copy it again"
        ) from None


def _fp8(found: Fields) -> Quantization:
    """Read fp8 with scales of blocks (DeepSeek-V3, transformers) or with one scale per tensor (vLLM)."""
    if found.get("fmt", "e4m3") != "e4m3":
        raise _refusal(f"('fp8', fmt {found['fmt']!r})")
    block = found.get("weight_block_size")
    scheme = Scheme("float", 8, (0, 0)) if block is None else Scheme("float", 8, _block(block), "weight_scale_inv")
    return Quantization(((("Linear",), scheme),), notices=(_activations(8, "fp8"),))


def _compressed_tensors(found: Fields) -> Quantization:
    sparsity = (found.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise _refusal(f"('compressed-tensors', sparsity {sparsity!r})")
    transforms = found.get("transform_config") or {}
    for name, is_used in (
        ("transforms", transforms.get("config_groups", transforms)),
        ("removed experts", found.get("moe_sparsity_config")),
    ):
        if is_used:
            raise _refusal(f"('compressed-tensors', {name})")
    groups, notices = [], []
    for group in found["config_groups"].values():
        if group.get("weights") is not None:
            scheme = _scheme(group["weights"], str(group.get("format") or found.get("format")))
            groups.append((_targets(group["targets"]), scheme))
        for activations in (group.get("input_activations"), group.get("output_activations")):
            if activations is not None:
                notices.append(_activations(activations.get("num_bits", 8), activations.get("type", "int")))
    if found.get("kv_cache_scheme") is not None:
        notices.append("the scales of config.json for a quantized KV cache are not used")
    return Quantization(tuple(groups), _targets(found.get("ignore") or []), tuple(dict.fromkeys(notices)))


def _targets(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{found!r} is not a list of names")
    for each in found:
        re.compile(each.removeprefix("re:"))
    return tuple(found)


def _scheme(weights: Fields, storage: str) -> Scheme:
    """Return the scheme that `QuantizationArgs` describe. storage: a `CompressionFormat`."""
    kind, bits = str(weights.get("type", "int")).lower(), int(weights.get("num_bits", 8))
    values: dict[tuple[str, str], Literal["int", "float", "packed"]] = {
        ("int-quantized", "int"): "int",
        ("naive-quantized", "int"): "int",
        ("float-quantized", "float"): "float",
        ("naive-quantized", "float"): "float",
        ("pack-quantized", "int"): "packed",
    }
    found = values.get((storage, kind))
    if found is None or bits not in ((4, 8) if found == "packed" else (8,)):
        raise _refusal(f"('compressed-tensors', format {storage!r}, {kind} of {bits} bits)")
    if weights.get("actorder") in ("group", "dynamic"):
        raise _refusal(f"('compressed-tensors', actorder {weights['actorder']!r})")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or {None: "tensor", -1: "channel"}.get(size, "group")
    if strategy == "tensor":
        block = (0, 0)
    elif strategy == "channel":
        block = (1, 0)
    elif strategy == "group":
        block = _block([1, size])
    elif strategy == "block":
        block = _block(weights.get("block_structure"))
    else:
        raise _refusal(f"('compressed-tensors', strategy {strategy!r})")
    has_zeros = not weights.get("symmetric", True)
    if has_zeros and (found == "float" or (found == "packed" and strategy not in ("channel", "group"))):
        raise _refusal(f"('compressed-tensors', format {storage!r}, strategy {strategy!r}, not symmetric)")
    return Scheme(found, bits, block, has_zeros=has_zeros)


def _block(found: Any) -> tuple[int, int]:
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(size, int) and size > 0 for size in found):
        raise ValueError(f"{found!r} is not the size of a block")
    return found[0], found[1]


def _activations(bits: int, kind: str) -> str:
    name = kind if kind == "fp8" else f"{bits}-bit {kind}"
    return (
        f"config.json requires activations in {name}, which this engine does not round; "
        "logits differ slightly from those of engines that do"
    )


def _refusal(what: str) -> UserError:
    return UserError(
        f"config.json describes quantized weights {what}, which this engine does not read; it reads {READABLE}"
    )


class Header(NamedTuple):
    """Header of a tensor in a container."""

    path: Path
    """The container; for a state dict, its name in errors."""
    dtype: str
    """As named in safetensors headers."""
    shape: Shape


class StoredTensor(NamedTuple):
    """A tensor that a checkpoint must have."""

    dtypes: tuple[str, ...]
    """Accepted dtypes, by their names in safetensors headers."""
    shapes: tuple[Shape, ...]
    """Accepted shapes."""


def stored_tensors(name: str, shape: Shape, scheme: Scheme) -> dict[str, StoredTensor]:
    """Return the tensors of the weight `name` [out, in], by their names."""
    layer = name.removesuffix("weight")
    grid = _grid(shape, scheme)
    scale_shapes = ((), (1,), grid) if grid == (1, 1) else (grid,)
    tensors = {layer + scheme.scales: StoredTensor(FLOATS, scale_shapes)}
    if scheme.values == "packed":
        rows, columns = shape
        tensors[name + "_packed"] = StoredTensor(("I32",), ((rows, _words(columns, scheme.bits)),))
        tensors[name + "_shape"] = StoredTensor(("I64", "I32"), ((2,),))
        zeros = StoredTensor(("I32",), ((_words(rows, scheme.bits), grid[1]),))
    else:
        tensors[name] = StoredTensor(("I8" if scheme.values == "int" else "F8_E4M3",), (shape,))
        zeros = StoredTensor(("I8",), scale_shapes)
    if scheme.has_zeros:
        tensors[name + "_zero_point"] = zeros
    return tensors


def weight_name(name: str) -> str:
    """Return the name of the weight that a tensor of a checkpoint belongs to; the name itself for other tensors."""
    layer, _, kind = name.rpartition(".")
    return f"{layer}.weight" if kind.startswith("weight_") else name


def _grid(shape: Shape, scheme: Scheme) -> tuple[int, int]:
    """Return the number of blocks in each dimension."""
    rows, columns = (-(-size // (block or size)) for size, block in zip(shape, scheme.block, strict=True))
    return rows, columns


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def dequantize(tensors: Mapping[str, Tensor], name: str, shape: Shape, scheme: Scheme) -> Tensor:
    """Return the weight `name`, float32 [out, in], from the tensors of `stored_tensors`, by their names."""
    rows, columns = shape
    grid = _grid(shape, scheme)

    def by_row(blocks: Tensor) -> Tensor:
        """Return the numbers of all blocks for each row, [out, blocks of columns]."""
        return blocks.reshape(grid).repeat_interleave(scheme.block[0] or rows, 0)[:rows]

    values, zeros = tensors.get(name), tensors.get(name + "_zero_point")
    scales = by_row(tensors[name.removesuffix("weight") + scheme.scales].float())
    if values is None:
        values = _unpack(tensors[name + "_packed"], scheme.bits, columns)
        if zeros is not None:
            # Zero points are packed along rows.
            zeros = _unpack(zeros.T.contiguous(), scheme.bits, rows).T
    weight = values.float()
    for index, block in enumerate(weight.split(scheme.block[1] or columns, dim=1)):
        if zeros is not None:
            block -= by_row(zeros)[:, index : index + 1]
        block *= scales[:, index : index + 1]
    return weight


def _unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Return integers of 4 or 8 bits as int8 [rows, count]. words: int32 [rows, words], the lowest bits first."""
    packed = words.view(torch.uint8)
    if bits == 8:
        return (packed[:, :count] ^ 128).view(torch.int8)
    halves = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return halves[:, :count].view(torch.int8) - 8
