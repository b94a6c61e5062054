"""Rotary position embedding (Su et al., 2021) and its scalings.

Scalings extend a model's context beyond the one it was first trained on. Formulas, dtypes and the order of operations
match transformers, because rounding changes the angles of long positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Linear:
    """Positions divided by a factor (Chen et al., 2023)."""

    factor: float

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:  # noqa: ARG002  # same interface
        """Return scaled frequencies, float32 [head_dim / 2]."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3:
    """Low frequencies are divided by a factor, high ones kept, those between interpolated (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        """Raise ValueError for an empty range."""
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be above 0 and below high_freq_factor, not {self.low_freq_factor} "
                f"with {self.high_freq_factor}"
            )

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:  # noqa: ARG002  # same interface
        """Return scaled frequencies, float32 [head_dim / 2]."""
        window = self.original_max_position_embeddings
        wavelengths = 2 * math.pi / frequencies
        kept = (window / wavelengths - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - kept) * frequencies / self.factor + kept * frequencies
        slower = torch.where(wavelengths > window / self.low_freq_factor, frequencies / self.factor, blended)
        return torch.where(wavelengths < window / self.high_freq_factor, frequencies, slower)


@dataclass(frozen=True)
class Yarn:
    """A ramp from kept to divided frequencies, with rescaled attention (YaRN; Peng et al., 2023)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    """Factor of cosines and sines."""
    beta_fast: float = 32.0
    """Rotations within the original context above which a frequency is kept."""
    beta_slow: float = 1.0
    """Rotations below which it is divided."""
    truncate: bool = True
    """Whether the ends of the ramp are rounded to whole components."""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that are not positive."""
        for name in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} of rope scaling must be above 0, not {getattr(self, name)}")

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """Return scaled frequencies, float32 [head_dim / 2]."""
        low, high = (
            self._component(rotations, theta, len(frequencies)) for rotations in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
        width = high - low or 0.001
        divided = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / width).clamp(0, 1)
        kept = 1 - divided
        periods = 1.0 / frequencies
        return 1.0 / (self.factor * periods) * (1 - kept) + frequencies * kept

    def _component(self, rotations: float, theta: float, components: int) -> float:
        """Return the fractional index of the component with a number of rotations within the original context."""
        window = self.original_max_position_embeddings
        return components * math.log(window / (rotations * 2 * math.pi)) / math.log(theta)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """Return the attention factor of a checkpoint without one; `mscale`: DeepSeek's variant."""

    if mscale and mscale_all_dim:
        return yarn_sharpness(factor, mscale) / yarn_sharpness(factor, mscale_all_dim)
    return yarn_sharpness(factor, 1.0)


def yarn_sharpness(factor: float, weight: float) -> float:
    """Return the factor of queries and keys for a context that is `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


Scaling = Linear | Llama3 | Yarn


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one model."""

    theta: float = 10_000.0
    """Base of the frequencies: the longest wavelength is 2 pi theta tokens."""
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for numbers out of range."""
        factor = 1.0 if self.scaling is None else self.scaling.factor
        for name, value, least in (("rope_theta", self.theta, 1), ("factor of rope scaling", factor, 0)):
            if not least < value < math.inf:
                raise ValueError(f"{name} must be a number above {least}, not {value}")

    def frequencies(self, head_dim: int) -> Tensor:
        """Return radians per token of each pair of components, float32 [head_dim / 2]."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / self.theta**exponents
        return frequencies if self.scaling is None else self.scaling.scale(frequencies, self.theta)

    def turns(self, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for `rotate`, float32 [N, 1, head_dim] each.

        positions: int64 [N]. frequencies: float32 [head_dim], those of `frequencies` for both halves of a head.
        """
        angles = positions[:, None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        if isinstance(self.scaling, Yarn):
            cos, sin = cos * self.scaling.attention_factor, sin * self.scaling.attention_factor
        return cos, sin


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [N, H, head_dim] by the angles of their positions; cosines and sines: [N, 1, head_dim].

    Components are paired as in Hugging Face checkpoints: i with i + head_dim / 2.
    """
    left, right = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-right, left), dim=-1) * sin
