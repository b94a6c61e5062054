"""Checkpoints in published formats of quantized weights, made from float ones, and the weights that they describe."""

from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests.engine.damage import edit_json


class Format(NamedTuple):
    """A published format of quantized weights."""

    fields: dict[str, Any]
    """`quantization_config` in `config.json`."""
    block: tuple[int, int]
    """Rows and columns that share a scale; 0: all."""
    bits: int = 8
    is_float: bool = False
    is_packed: bool = False
    is_symmetric: bool = True
    scales: str = "weight_scale"
    scale_dtype: torch.dtype = torch.bfloat16
    scale_shape: tuple[int, ...] | None = None
    """Shape of the scale of a whole tensor."""


def compressed(storage, strategy, *, kind="int", bits=8, symmetric=True, **more):
    """The `quantization_config` that llm-compressor writes."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": False, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": storage,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"],
        "kv_cache_scheme": None,
    }


def compressed_format(storage, strategy, block, *, scale_dtype=torch.bfloat16, **weights):
    """A format of llm-compressor, whose whole tensors have scales of one number."""
    return Format(
        compressed(storage, strategy, **weights),
        block,
        weights.get("bits", 8),
        is_float=weights.get("kind") == "float",
        is_packed=storage == "pack-quantized",
        is_symmetric=weights.get("symmetric", True),
        scale_dtype=scale_dtype,
        scale_shape=(1,) if strategy == "tensor" else None,
    )


FLOAT = {"kind": "float"}
FORMATS = {
    "int8, channels": compressed_format("int-quantized", "channel", (1, 0)),
    "int8, tensors": compressed_format("naive-quantized", "tensor", (0, 0)),
    "int8, not symmetric": compressed_format(
        "int-quantized", "channel", (1, 0), scale_dtype=torch.float32, symmetric=False
    ),
    "fp8, channels": compressed_format("float-quantized", "channel", (1, 0), **FLOAT),
    "fp8, tensors": compressed_format("float-quantized", "tensor", (0, 0), **FLOAT),
    "fp8, blocks": compressed_format("float-quantized", "block", (16, 40), **FLOAT, block_structure=[16, 40]),
    "packed, 8 bits, channels": compressed_format("pack-quantized", "channel", (1, 0)),
    "packed, 4 bits, groups": compressed_format("pack-quantized", "group", (1, 32), bits=4, group_size=32),
    "packed, 4 bits, groups, not symmetric": compressed_format(
        "pack-quantized", "group", (1, 16), bits=4, group_size=16, symmetric=False
    ),
    "DeepSeek's fp8": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 40]},
        (16, 40), is_float=True, scales="weight_scale_inv", scale_dtype=torch.float32,
    ),
    "vLLM's fp8": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        (0, 0), is_float=True, scale_dtype=torch.float32, scale_shape=(),
    ),
}  # fmt: skip


def quantize(weight, form):
    """Return the tensors of a weight [out, in] by the last parts of their names, and the weight that they describe."""
    rows, columns = (block or size for block, size in zip(form.block, weight.shape, strict=True))
    grid = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn if form.is_float else torch.int8)
    scales, zeros = torch.empty(grid, dtype=form.scale_dtype), torch.zeros(grid, dtype=torch.int8)
    described = torch.empty(weight.shape)
    largest = 448 if form.is_float else 2 ** (form.bits - 1) - 1
    for row in range(grid[0]):
        for column in range(grid[1]):
            part = (slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))
            found = weight[part].float()
            if not form.is_symmetric:
                middle = (found.max() + found.min()) / 2
                scales[row, column] = (found.max() - middle) / largest
                zeros[row, column] = int(-middle / scales[row, column] / 2)  # half of it, which is within the range
            else:
                scales[row, column] = found.abs().max() / largest
            scaled = found / float(scales[row, column]) + int(zeros[row, column])
            if not form.is_float:
                scaled = scaled.round().clamp(-largest - 1, largest)
            values[part] = scaled.to(values.dtype)
            described[part] = (values[part].float() - int(zeros[row, column])) * float(scales[row, column])
    tensors = {form.scales: scales if form.scale_shape is None else scales.reshape(form.scale_shape)}
    if form.is_packed:
        tensors |= {"weight_packed": pack(values, form.bits), "weight_shape": torch.tensor(weight.shape)}
        packed_zeros = pack(zeros.T, form.bits).T.contiguous()
    else:
        tensors["weight"], packed_zeros = values, zeros
    if not form.is_symmetric:
        tensors["weight_zero_point"] = packed_zeros
    return tensors, described


def pack(values, bits):
    """Pack the rows of a matrix of integers into int32, the lowest bits first, one number at a time."""
    packed = []
    for row in values.tolist():
        whole = sum(value + 2 ** (bits - 1) << index * bits for index, value in enumerate(row))
        words = -(-len(row) * bits // 32)
        packed.append([(whole >> 32 * word) & 0xFFFFFFFF for word in range(words)])
    return torch.tensor(packed).to(torch.int32)


def quantize_folder(folder, form, *, skip=("lm_head", "gate.weight", "embed_tokens")):
    """Quantize the weights of the layers in a folder. Returns all weights that it then describes, as floats."""
    tensors = load_file(folder / "model.safetensors")
    stored, described = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and not any(part in name for part in skip):
            parts, described[name] = quantize(stored.pop(name), form)
            stored |= {name.removesuffix("weight") + part: each for part, each in parts.items()}
    save_file(stored, folder / "model.safetensors")
    edit_json(folder / "config.json", quantization_config=form.fields)
    return described
