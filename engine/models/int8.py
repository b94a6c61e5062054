"""Weight-only int8 quantization of a decoder, symmetric and per output channel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.decoder import Decoder
from engine.models.packed import replace_linears

LARGEST = 127
"""Largest absolute value of a quantized weight; -128 is not used, so that the range is symmetric."""


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and one scale per output channel.

    The weights are converted to the dtype of the input in every pass: this saves memory but no time.
    """

    weight: Tensor
    """int8 [out, in]."""
    scale: Tensor
    """float [out]."""
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: float [out, in]."""
        super().__init__()
        scale = (weight.abs().amax(dim=1) / LARGEST).clamp(min=torch.finfo(weight.dtype).tiny)
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [N, in] to [N, out]."""
        product = F.linear(hidden, self.weight.to(hidden.dtype)) * self.scale
        return product if self.bias is None else product + self.bias


def quantize_int8(decoder: Decoder) -> Decoder:
    """Replace the linear layers of a decoder in place and return it; it can then neither be trained nor saved.

    On other devices than a CPU, experts keep their weights.
    """
    replace_linears(decoder, Int8Linear)
    return decoder
