"""Linear layers whose weights have another form in memory: oneDNN's blocked layout, or one quantized byte each.

Packed layers make the matrix products of a verify step on a CPU about twice as fast. Their order of summation does not
depend on the number of tokens in a step, so a token's logits are bitwise equal whether it is decoded alone or within a
draft.

Of a quantized layer, some rows of the weight at a time are dequantized into the processor's cache and multiplied in the
dtype of the input. So it computes with exactly the weights that dequantizing the checkpoint gives. It saves memory, but
no time: a step of few tokens takes longer than with packed float weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.checkpoint import Checkpoint
from engine.models.decoder import Decoder
from engine.models.experts import GroupedLinear, LinearPerExpert
from engine.models.families import checkpoint_parts
from engine.models.quantization import QuantizedWeight

TOKENS = 16
"""Number of rows that the layout is optimized for; with 16, steps of 1 to 64 tokens were fastest or close to it."""

LEAST_ROWS = 4
"""Number of rows to which inputs of products with plain weights are padded. CPU libraries have other kernels for fewer
rows, which sum in another order; with this many, a row's bits do not depend on the number of rows."""
TILE = 1 << 19
"""Number of weights that are dequantized at once on a CPU. Of 64 Ki to 4 Mi, this many were the fastest or close to it
for layers of 2048 and 5632 channels and 1 to 64 tokens."""
LARGEST = 127
"""Largest absolute value of weights that `quantize_int8` rounds; without -128 the range is symmetric."""


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
                setattr(parent, name, LinearPerExpert(make(weight, None) for weight in plain.weight.detach()))


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight."""

    values: Tensor
    """Parts of a `QuantizedWeight`."""
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.columns = weight.columns
        for name, tensor in {**weight._asdict(), "bias": bias}.items():
            if name != "columns":
                self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states [N, in] to [N, out]."""
        product = multiply(hidden, QuantizedWeight(self.values, self.scales, self.zeros, self.columns))
        return product if self.bias is None else product + self.bias

    def overwrite(self, weight: Tensor) -> None:
        """Replace the weight of a layer that `rounded_to_int8` returned by another one, [out, in]."""
        rounded = _rounded(weight)
        self.values.copy_(rounded.values)
        self.scales.copy_(rounded.scales)


def multiply(hidden: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return hidden [N, in] times the transpose of a weight [out, in], in the dtype of `hidden`."""
    if not hidden.is_cpu:
        return F.linear(hidden, weight.dequantize().to(hidden.dtype))
    count, inputs = hidden.shape
    if count < LEAST_ROWS:
        hidden = F.pad(hidden, (0, 0, 0, LEAST_ROWS - count))
    product = torch.ops.mkldnn._linear_pointwise if supports_onednn(hidden.device, hidden.dtype) else _plain_product
    size, outputs = max(1, TILE // inputs), len(weight.values)
    result = hidden.new_empty(len(hidden), outputs)
    for first in range(0, outputs, size):
        tile = weight.part((slice(first, first + size),)).dequantize().to(hidden.dtype)
        result[:, first : first + size] = product(hidden, tile, None, "none", [], "")
    return result[:count]


def _plain_product(hidden: Tensor, weight: Tensor, *_: object) -> Tensor:
    return F.linear(hidden, weight)


def keep_quantized(
    decoder: Decoder,
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    part: Callable[[str], tuple[slice, ...]] | None = None,
) -> None:
    """Replace layers of a decoder on the meta device, or of a part of it, by ones that keep their quantized weights.

    These are layers whose weights in the checkpoint all have the same scheme. The output projection is not replaced,
    because networks that draft read its weight. Layers whose inputs are divided within blocks of columns are not
    replaced either.
    shapes: of the undivided weights, by their names in the checkpoint. part: as for `Checkpoint.copy_into`.

    Raises UserError for values that are not numbers.
    """
    for path, module in list(decoder.named_modules()):
        if not isinstance(module, nn.Linear | GroupedLinear) or module is decoder.lm_head:
            continue
        names = [name for name, _ in checkpoint_parts(f"{path}.weight", decoder.config)]
        schemes = {checkpoint.scheme(name) for name in names}
        found = schemes.pop()
        if schemes or found is None:
            continue
        inputs = module.weight.shape[-1]
        if inputs != shapes[names[0]][1] and inputs % (found.block[1] or inputs):
            continue
        count = module.count if isinstance(module, GroupedLinear) else 1
        size, layers = len(names) // count, []
        for first in range(0, len(names), size):
            own = names[first : first + size]
            weights = [checkpoint.quantized(name, () if part is None else part(name)) for name in own]
            layers.append(QuantizedLinear(_joined(weights), getattr(module, "bias", None)))
        decoder.set_submodule(path, LinearPerExpert(layers) if isinstance(module, GroupedLinear) else layers[0])


def _joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return a copy of the rows of several weights."""
    values, scales, zeros, columns = zip(*weights, strict=True)
    whole = torch.cat(values)
    return QuantizedWeight(
        whole, torch.cat(scales), None if zeros[0] is None else torch.cat(zeros), min(columns[0], whole.shape[1])
    )


def quantize_int8(decoder: Decoder) -> Decoder:
    """Round the linear layers of a decoder to int8, symmetric and with one scale per output channel, in place.

    Returns the decoder; it can then neither be trained nor saved. On other devices than a CPU, experts keep their
    weights.
    """
    replace_linears(decoder, rounded_to_int8)
    return decoder


def rounded_to_int8(weight: Tensor, bias: Tensor | None) -> QuantizedLinear:
    """Return a layer with the weight [out, in] rounded to int8."""
    return QuantizedLinear(_rounded(weight), bias)


def _rounded(weight: Tensor) -> QuantizedWeight:
    scales = (weight.float().abs().amax(dim=1, keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    values = (weight / scales).round().to(torch.int8)
    return QuantizedWeight(values, scales, None, weight.shape[1])
