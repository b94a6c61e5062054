"""Rotary position embedding (Su et al., 2021): how fast each pair of components turns, and the turning itself.

The scalings stretch a model's context beyond the one it was first trained on. Their formulas, in float32 and in this
order of operations, are those of transformers: at long positions another rounding is another angle.
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

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:  # noqa: ARG002  # as the others
        """Scaled frequencies, float32 [head_dim / 2]."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3:
    """Slow turns are divided by a factor, fast ones kept, those between are blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        """Raises ValueError for a range that ends before it begins."""
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be above 0 and below high_freq_factor, not {self.low_freq_factor} "
                f"with {self.high_freq_factor}"
            )

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:  # noqa: ARG002  # as the others
        """Scaled frequencies, float32 [head_dim / 2]."""
        window = self.original_max_position_embeddings
        wavelengths = 2 * math.pi / frequencies
        kept = (window / wavelengths - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - kept) * frequencies / self.factor + kept * frequencies
        slower = torch.where(wavelengths > window / self.low_freq_factor, frequencies / self.factor, blended)
        return torch.where(wavelengths < window / self.high_freq_factor, frequencies, slower)


@dataclass(frozen=True)
class Yarn:
    """A ramp from kept to divided frequencies, and attention made a little sharper (Peng et al., 2023)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    """Cosines and sines are multiplied by it."""
    beta_fast: float = 32.0
    """Turns within the original context above which a frequency is kept."""
    beta_slow: float = 1.0
    """Turns below which it is divided."""
    truncate: bool = True
    """Whether the ends of the ramp are whole components."""

    def __post_init__(self) -> None:
        """Raises ValueError for numbers without a logarithm."""
        for name in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} of rope scaling must be above 0, not {getattr(self, name)}")

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """Scaled frequencies, float32 [head_dim / 2]."""
        low, high = (self._component(turns, theta, len(frequencies)) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
        width = high - low or 0.001
        divided = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / width).clamp(0, 1)
        kept = 1 - divided
        periods = 1.0 / frequencies
        return 1.0 / (self.factor * periods) * (1 - kept) + frequencies * kept

    def _component(self, turns: float, theta: float, components: int) -> float:
        """The component, not rounded, that makes so many turns within the original context."""
        window = self.original_max_position_embeddings
        return components * math.log(window / (turns * 2 * math.pi)) / math.log(theta)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The factor for a checkpoint that does not say it; `mscale` is DeepSeek's refinement."""

    def sharpness(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return sharpness(mscale) / sharpness(mscale_all_dim) if mscale and mscale_all_dim else sharpness(1.0)


Scaling = Linear | Llama3 | Yarn


@dataclass(frozen=True)
class Rope:
    """How the heads of a model turn with position."""

    theta: float = 10_000.0
    """The longest wavelength, in tokens over 2 pi."""
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that turn nothing."""
        factor = 1.0 if self.scaling is None else self.scaling.factor
        for name, value, least in (("rope_theta", self.theta, 1), ("factor of rope scaling", factor, 0)):
            if not least < value < math.inf:
                raise ValueError(f"{name} must be a number above {least}, not {value}")

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians that each pair of components turns by from token to token, float32 [head_dim / 2]."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / self.theta**exponents
        return frequencies if self.scaling is None else self.scaling.scale(frequencies, self.theta)

    def turns(self, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for `rotate`, float32 [N, 1, head_dim] each.

        positions: int64 [N]. frequencies: float32 [head_dim], as `frequencies` gives them, for each half of a head.
        """
        angles = positions[:, None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        if isinstance(self.scaling, Yarn):
            cos, sin = cos * self.scaling.attention_factor, sin * self.scaling.attention_factor
        return cos, sin


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads [N, H, head_dim] by the angles of their positions, [N, 1, head_dim].

    Halves are paired as in Hugging Face checkpoints: component i turns with component i + head_dim / 2.
    """
    left, right = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-right, left), dim=-1) * sin
