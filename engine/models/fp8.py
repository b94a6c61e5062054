"""Weights in 8-bit floating point with one scale per block, as DeepSeek-V3 is published; dequantized when loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ssd.errors import UserError

SCALE = "_scale_inv"
"""Suffix of the name of a weight's scales, float [ceil(out / block rows), ceil(in / block columns)]."""
STORED = "F8_E4M3"
"""Dtype of quantized weights in safetensors headers."""

Block = tuple[int, int]
"""Rows and columns that share a scale."""


def fp8_block(fields: Mapping[str, Any]) -> Block | None:
    """Return the blocks of a `config.json`; None for weights that are not quantized.

    Raises UserError for any other quantization.
    """
    quantization = fields.get("quantization_config") or fields.get("compression_config")
    if not quantization:
        return None
    known = quantization if isinstance(quantization, dict) else {}
    block = known.get("weight_block_size")
    sizes = block if isinstance(block, list) else []
    is_block = len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes)
    if known.get("quant_method") != "fp8" or known.get("fmt", "e4m3") != "e4m3" or not is_block:
        raise UserError(
            f"config.json describes quantized weights ({known.get('quant_method')!r}), which this engine does not "
            "read; it reads fp8 with weight_block_size, bfloat16 and float32"
        )
    return sizes[0], sizes[1]


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Return the shape of the scales of a weight [out, in]."""
    return tuple(-(-size // each) for size, each in zip(shape, block, strict=True))


def dequantize(weight: Tensor, scales: Tensor, block: Block, start: tuple[int, int] = (0, 0)) -> Tensor:
    """Return part of a weight float8 [out, in] times the scales of its blocks, float32 [out, in].

    scales: of all blocks of the whole weight. start: row and column of the whole weight at which the part begins.
    """
    rows, columns = (
        torch.arange(first, first + size) // each for first, size, each in zip(start, weight.shape, block, strict=True)
    )
    return weight.to(torch.float32) * scales.float()[rows[:, None], columns]
