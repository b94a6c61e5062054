"""Weights in a layout for few tokens at a time on a CPU.

With oneDNN's blocked layout the products of a verify step are about twice as fast as with the plain one, and its sums
do not depend on how many tokens share a step: a token's logits are equal to the last bit, decoded alone or within a
draft.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.models.decoder import Decoder

TOKENS = 16
"""Number of rows that the layout is chosen for; with 16, steps of 1 to 64 tokens were fastest, or nearly so."""


class PackedLinear(nn.Module):
    """A linear map whose weight is in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TOKENS)
        self._bias = bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [N, in] to [N, out]."""
        return torch.ops.mkldnn._linear_pointwise(hidden, self._weight, self._bias, "none", [], "")


def pack(decoder: Decoder) -> Decoder:
    """Replace the linear maps of a decoder on the CPU by packed ones; without support in oneDNN, return it unchanged.

    A packed decoder can run, but neither be trained nor saved. The plain weights are freed one by one, so that only one
    map at a time needs memory for both.
    """
    weight = decoder.embedding.weight
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return decoder
    if weight.dtype == torch.float16:
        return decoder
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return decoder
    for parent in [module for module in decoder.modules() if not isinstance(module, nn.Linear)]:
        for name in [name for name, child in parent.named_children() if isinstance(child, nn.Linear)]:
            plain = parent.get_submodule(name)
            assert isinstance(plain, nn.Linear)
            bias = None if plain.bias is None else plain.bias.detach()
            setattr(parent, name, PackedLinear(plain.weight.detach(), bias))
    return decoder
