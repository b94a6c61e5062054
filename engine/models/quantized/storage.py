"""Quantized weights as checkpoints store them: names, shapes and dtypes of their tensors, and their values.

A weight [out, in] is (values - zero points) * scales. In memory the values take one byte each, and every row has its
own scales: one for each block of columns.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.quantized.config import Scheme

FLOATS = ("F64", "F32", "BF16", "F16")
"""Dtypes of weights that are not quantized, by their names in safetensors headers."""

PARTS = ("values", "scales", "zeros")
"""Names of the tensors of a `QuantizedWeight`, and of the parameters of layers that keep one."""

Shape = tuple[int, ...]


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


class QuantizedWeight(NamedTuple):
    """A weight [out, in], or some rows of it."""

    values: Tensor
    """int8 or float8_e4m3fn [out, in]."""
    scales: Tensor
    """float32 [out, blocks of columns]."""
    zeros: Tensor | None
    """Zero points of the same blocks, int8; None if all are 0."""
    columns: int
    """Number of columns that share a scale; the last block may have fewer."""

    def part(self, index: tuple[slice, ...]) -> QuantizedWeight:
        """Return rows, or rows and columns, of the weight. index: at most one slice per dimension."""
        rows, columns = (*index, slice(None), slice(None))[:2]
        first, end, _ = columns.indices(self.values.shape[1])
        size = gcd(self.columns, first)  # the columns may begin within a block, which is then divided

        def blocks(each: Tensor) -> Tensor:
            return each[rows].repeat_interleave(self.columns // size, 1)[:, first // size : -(-end // size)]

        zeros = None if self.zeros is None else blocks(self.zeros)
        return QuantizedWeight(self.values[rows, columns], blocks(self.scales), zeros, size)

    def dequantize(self) -> Tensor:
        """Return the weight, float32 [out, in]."""
        weight, scales = self.values, self.scales
        if weight.is_floating_point() and weight.is_cpu:
            weight, scales = _smaller_halves(weight), scales * 256
        weight = weight.float()
        size = weight.shape[1]
        if size % self.columns == 0:
            blocks = weight.view(len(weight), -1, self.columns)
            if self.zeros is not None:
                blocks -= self.zeros[:, :, None]
            return blocks.mul_(scales[:, :, None]).view_as(weight)
        if self.zeros is not None:
            weight -= self.zeros.repeat_interleave(self.columns, 1)[:, :size]
        return weight.mul_(scales.repeat_interleave(self.columns, 1)[:, :size])


def assemble(tensors: dict[str, Tensor], name: str, shape: Shape, scheme: Scheme) -> QuantizedWeight:
    """Return the weight `name` [out, in] from the tensors of `stored_tensors`, by their names."""
    rows, columns = shape
    grid = _grid(shape, scheme)

    def by_row(blocks: Tensor) -> Tensor:
        return blocks.reshape(grid).repeat_interleave(scheme.block[0] or rows, 0)[:rows].contiguous()

    zeros = tensors.get(name + "_zero_point")
    if scheme.values == "packed":
        values = _unpack(tensors[name + "_packed"], scheme.bits, columns)
        if zeros is not None:
            # Zero points are packed along rows.
            zeros = _unpack(zeros.T.contiguous(), scheme.bits, rows).T
    else:
        values = tensors[name]
    scales = tensors[name.removesuffix("weight") + scheme.scales].float()
    return QuantizedWeight(values, by_row(scales), None if zeros is None else by_row(zeros), scheme.block[1] or columns)


def _unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Return integers of 4 or 8 bits as int8 [rows, count]. words: int32 [rows, words], the lowest bits first."""
    packed = words.view(torch.uint8)
    if bits == 8:
        return (packed[:, :count] ^ 128).view(torch.int8)
    halves = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return halves[:, :count].view(torch.int8) - 8


def _smaller_halves(values: Tensor) -> Tensor:
    """Return float8_e4m3fn values without NaN divided by 256, as float16, exactly.

    On a CPU this takes a tenth of the time of PyTorch's conversion. Bits are moved to their places in float16, whose
    exponents have a bias that is larger by 8.
    """
    bits = values.view(torch.int8).to(torch.int16)  # copies the sign to all upper bits
    return bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16)


def has_nan(values: Tensor) -> bool:
    """Return whether values have a NaN; float8_e4m3fn has no infinities, and int8 has neither."""
    return values.is_floating_point() and bool(((values.view(torch.int8) & 127) == 127).any())
