"""Linear layers whose weights have another form in memory: oneDNN's blocked layout, or int8.

Packed layers make the matrix products of a verify step on a CPU about twice as fast. Their order of summation does not
depend on the number of tokens in a step, so a token's logits are bitwise equal whether it is decoded alone or within a
draft.

Of an int8 layer, some rows of the weight at a time are converted in the processor's cache and multiplied in the dtype
of the input. It saves memory, but no time: a step of few tokens takes longer than with packed float weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.decoder import Decoder
from engine.models.experts import GroupedLinear, LinearPerExpert

TOKENS = 16
"""Number of rows that the layout is optimized for; with 16, steps of 1 to 64 tokens were fastest or close to it."""

LEAST_ROWS = 4
"""Number of rows to which inputs of products with plain weights are padded. CPU libraries have other kernels for fewer
rows, which sum in another order; with this many, a row's bits do not depend on the number of rows."""
TILE = 1 << 19
"""Number of int8 weights that are converted at once on a CPU. Of 64 Ki to 4 Mi, this many were the fastest or close to
it for layers of 2048 and 5632 channels and 1 to 64 tokens."""
LARGEST = 127
"""Largest absolute value of an int8 weight; without -128 the range is symmetric."""


class PackedLinear(nn.Module):
    """A linear layer whose weight is in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.bias = bias
        self.overwrite(weight)

    def overwrite(self, weight: Tensor) -> None:
        """Replace the weight, [out, in]."""
        self.shape = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TOKENS)

    def plain_weight(self) -> Tensor:
        """Return a copy of the weight, [out, in]."""
        dense: Tensor = self._weight.to_dense()
        return dense

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [N, in] to [N, out]."""
        return torch.ops.mkldnn._linear_pointwise(hidden, self._weight, self.bias, "none", [], "")


Module = TypeVar("Module", bound=nn.Module)


def pack(module: Module) -> Module:
    """Replace the linear layers of a module on the CPU with packed ones, where oneDNN supports their dtype; return it.

    Routers are float32 whatever the others are. A packed module can neither be trained nor saved. The plain weights are
    freed one by one, so that only one layer at a time needs memory for both.
    """
    replace_linears(module, PackedLinear, lambda weight: supports_onednn(weight.device, weight.dtype))
    return module


def supports_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes matrix products of a dtype on a device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available() or dtype == torch.float16:
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def replace_linears(
    module: nn.Module,
    make: Callable[[Tensor, Tensor | None], nn.Module],
    is_replaced: Callable[[Tensor], bool] = lambda _: True,
) -> None:
    """Replace the linear layers of a module, and those of its experts on a CPU.

    make: returns the new layer for a weight [out, in] and a bias [out]. is_replaced: for which weights.
    """
    for parent in list(module.modules()):
        for name, plain in list(parent.named_children()):
            if not (isinstance(plain, nn.Linear | GroupedLinear) and is_replaced(plain.weight)):
                continue
            if isinstance(plain, nn.Linear):
                bias = None if plain.bias is None else plain.bias.detach()
                setattr(parent, name, make(plain.weight.detach(), bias))
            elif plain.weight.is_cpu:
                setattr(parent, name, LinearPerExpert(make(weight, None) for weight in plain.weight.detach()))


class Int8Linear(nn.Module):
    """A linear layer whose weight is rounded to int8, symmetric and with one scale per output channel."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        values, scales = round_to_int8(weight)
        self.values = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def overwrite(self, weight: Tensor) -> None:
        """Replace the weight by another one, [out, in]."""
        for own, new in zip((self.values, self.scales), round_to_int8(weight), strict=True):
            own.copy_(new)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [N, in] to [N, out], in the dtype of `hidden`."""
        product = self._product_on_cpu(hidden) if hidden.is_cpu else F.linear(hidden, self._floats(slice(None), hidden))
        return product if self.bias is None else product + self.bias

    def _product_on_cpu(self, hidden: Tensor) -> Tensor:
        count, inputs = hidden.shape
        if count < LEAST_ROWS:
            hidden = F.pad(hidden, (0, 0, 0, LEAST_ROWS - count))
        product = torch.ops.mkldnn._linear_pointwise if supports_onednn(hidden.device, hidden.dtype) else _plain_product
        size, outputs = max(1, TILE // inputs), len(self.values)
        result = hidden.new_empty(len(hidden), outputs)
        for first in range(0, outputs, size):
            rows = slice(first, first + size)
            result[:, rows] = product(hidden, self._floats(rows, hidden), None, "none", [], "")
        return result[:count]

    def _floats(self, rows: slice, like: Tensor) -> Tensor:
        """Return rows of the weight in the dtype of `like`."""
        return self.values[rows].float().mul_(self.scales[rows]).to(like.dtype)


def _plain_product(hidden: Tensor, weight: Tensor, *_: object) -> Tensor:
    return F.linear(hidden, weight)


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [out, in] rounded to int8, and its scales, float32 [out, 1]."""
    scales = (weight.float().abs().amax(dim=1, keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight / scales).round().to(torch.int8), scales


def quantize_int8(decoder: Decoder) -> Decoder:
    """Round the linear layers of a decoder to int8, in place.

    Returns the decoder; it can then neither be trained nor saved. On other devices than a CPU, experts keep their
    weights.
    """
    replace_linears(decoder, Int8Linear)
    return decoder
