"""Cost profiles of well-known GPUs and model sizes, computed instead of measured.

A forward pass takes at least the time to read its weights and its KV cache from memory, and at least the time of its
arithmetic (Williams et al., "Roofline", 2009). Real engines take longer, mostly by factors that cancel in a speed-up.
Weights are bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

from ssd.budget.cost_profile import CostProfile
from ssd.errors import UserError

CONTEXT = 1024
"""Tokens of KV cache that each sequence reads."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEPTHS = (1, 16)
"""Draft depths of the profile; durations are linear in the depth."""
BYTES = 2
"""Size of a bfloat16 value."""
EAGLE3_VOCABULARY = 32_000
"""Size of the draft vocabulary of published EAGLE-3 heads."""


class Gpu(NamedTuple):
    """Figures of the manufacturer's data sheet."""

    bytes_per_s: float
    flops: float
    """Dense bfloat16 operations per second."""


GPUS = {
    "l4": Gpu(0.300e12, 121e12),
    "l40s": Gpu(0.864e12, 362e12),
    "a100": Gpu(2.039e12, 312e12),
    "h100": Gpu(3.35e12, 989e12),
    "h200": Gpu(4.8e12, 989e12),
    "b200": Gpu(8.0e12, 2250e12),
    "mi300x": Gpu(5.3e12, 1307e12),
}
"""A100: 80 GB; A100, H100 and H200: SXM."""


class ModelSize(NamedTuple):
    """Shape of a dense model."""

    parameters: float
    """Parameters that a forward pass reads, without the embedding table unless the output projection shares it."""
    layers: int
    hidden: int
    vocabulary: int
    kv_values: int
    """Values that a token stores in the KV cache of one layer."""

    @property
    def head(self) -> float:
        """Number of parameters of the output projection."""
        return self.hidden * self.vocabulary

    @property
    def layer(self) -> float:
        """Number of parameters of one layer."""
        return (self.parameters - self.head) / self.layers


SIZES = {
    "1b": ModelSize(1.24e9, 16, 2048, 128_256, 1024),
    "3b": ModelSize(3.21e9, 28, 3072, 128_256, 2048),
    "8b": ModelSize(7.50e9, 32, 4096, 128_256, 2048),
    "32b": ModelSize(32.0e9, 64, 5120, 151_936, 2048),
    "70b": ModelSize(69.5e9, 80, 8192, 128_256, 2048),
}
"""Shapes of Llama 3.1 and 3.2 (1b, 3b, 8b, 70b) and Qwen3 (32b)."""


def roofline(gpu: str, size: str) -> CostProfile:
    """Return the profile of a GPU of `GPUS` that runs a model of `SIZES`. Raises UserError for other names."""
    for option, name, known in (("gpu", gpu, GPUS), ("model-size", size, SIZES)):
        if name not in known:
            raise UserError(
                f"--{option} {name}: unknown; give {', '.join(known)}, or --cost-profile with a measurement"
            )
    device, model = GPUS[gpu], SIZES[size]
    cache = CONTEXT * model.layers * model.kv_values
    step_ms = {
        tokens: {
            sequences: _milliseconds(device, BYTES * (model.parameters + sequences * cache), model.parameters * tokens)
            for sequences in SEQUENCES
            if sequences <= tokens
        }
        for tokens in TOKENS
    }
    drafter_ms = {
        kind: {
            depth: {n: depth * _milliseconds(device, weight_bytes, parameters * n) for n in SEQUENCES}
            for depth in DEPTHS
        }
        for kind, (parameters, weight_bytes) in _drafters(model).items()
    }
    return CostProfile(gpu, size, step_ms, drafter_ms, "roofline")


def _milliseconds(gpu: Gpu, moved_bytes: float, products: float) -> float:
    """Return the duration of a pass; products: parameters times tokens, each a multiplication and an addition."""
    return 1e3 * max(moved_bytes / gpu.bytes_per_s, 2 * products / gpu.flops)


def _drafters(model: ModelSize) -> dict[str, tuple[float, float]]:
    """Return the number of parameters, and their bytes, that each kind reads per draft position.

    The draft model has the smallest of `SIZES`. Kinds without a network are not predicted.
    """
    small = SIZES["1b"]
    eagle = model.layer + 2 * model.hidden**2 + model.head
    parameters = {
        "draft-model": small.parameters,
        "mtp": eagle,
        "eagle": eagle,
        "eagle3": model.layer + 5 * model.hidden**2 + model.hidden * EAGLE3_VOCABULARY,
        "medusa": model.hidden**2 + model.head,
    }
    return {
        **{kind: (count, BYTES * count) for kind, count in parameters.items()},
        "self-int8": (model.parameters, model.parameters),
    }
