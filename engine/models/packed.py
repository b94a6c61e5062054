"""Linear layers in oneDNN's blocked layout, for steps of few tokens on a CPU.

The matrix products of a verify step are about twice as fast as with the plain layout. Their order of summation does not
depend on the number of tokens in a step, so a token's logits are bitwise equal whether it is decoded alone or within a
draft.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.models.decoder import Decoder
from engine.models.experts import GroupedLinear, LinearPerExpert

TOKENS = 16
"""Number of rows that the layout is optimized for; with 16, steps of 1 to 64 tokens were fastest or close to it."""

LEAST_ROWS = 4
"""Number of rows to which inputs of products with plain weights are padded. CPU libraries have other kernels for fewer
rows, which sum in another order; with this many, a row's bits do not depend on the number of rows."""


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


def pack(decoder: Decoder) -> Decoder:
    """Replace the linear layers of a decoder on the CPU with packed ones; without oneDNN support, return it unchanged.

    A packed decoder can neither be trained nor saved. The plain weights are freed one by one, so that only one layer at
    a time needs memory for both.
    """
    pack_linears(decoder, decoder.embedding.weight)
    return decoder


def pack_linears(module: nn.Module, weight: Tensor) -> None:
    """Replace the linear layers of a module on the CPU with packed ones, where oneDNN supports it.

    weight: one of its weights, for their device and dtype.
    """
    if supports_onednn(weight.device, weight.dtype):
        replace_linears(module, PackedLinear)


def supports_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes matrix products of a dtype on a device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available() or dtype == torch.float16:
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def replace_linears(module: nn.Module, make: Callable[[Tensor, Tensor | None], nn.Module]) -> None:
    """Replace the linear layers of a module, and those of its experts on a CPU.

    make: returns the new layer for a weight [out, in] and a bias [out].
    """
    for parent in list(module.modules()):
        for name, plain in list(parent.named_children()):
            if isinstance(plain, nn.Linear):
                bias = None if plain.bias is None else plain.bias.detach()
                setattr(parent, name, make(plain.weight.detach(), bias))
            elif isinstance(plain, GroupedLinear) and plain.weight.is_cpu:
                setattr(parent, name, LinearPerExpert(plain, lambda weight: make(weight, None)))
