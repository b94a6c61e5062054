"""Convert processed logits to tokens or distributions, each row with the settings of its request."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.executor.kernels import sample as kernel
from engine.executor.transfer import on_device
from engine.sampling.noise import Truncation, divisors, sample_tokens, truncate
from engine.scheduling.request import SamplingParams


class RowSettings(NamedTuple):
    """Sampling settings of M rows."""

    temperatures: np.ndarray
    """float64 [M]; 0 for greedy."""
    seeds: np.ndarray
    """int64 [M]."""
    positions: np.ndarray
    """int64 [M]: position of each sampled token within its sequence."""
    truncation: Truncation | None
    """None if no row is truncated."""


def row_settings(samplings: SequenceOf[SamplingParams], counts: np.ndarray, positions: np.ndarray) -> RowSettings:
    """Return the settings of M rows. counts: int64 [n], rows of each of `samplings`. positions: int64 [M]."""
    truncation = None
    if any(sampling.truncates for sampling in samplings):
        truncation = Truncation(
            top_k=np.repeat([sampling.top_k for sampling in samplings], counts),
            top_p=np.repeat([sampling.top_p for sampling in samplings], counts),
            min_p=np.repeat([sampling.min_p for sampling in samplings], counts),
        )
    return RowSettings(
        temperatures=np.repeat(np.array([sampling.temperature for sampling in samplings], np.float64), counts),
        seeds=np.repeat(np.array([sampling.seed for sampling in samplings], np.int64), counts),
        positions=positions,
        truncation=truncation,
    )


def sample(logits: Tensor, settings: RowSettings) -> Tensor:
    """Return the target's token of each row, int64 [M]. logits: float32 [M, V], processed."""
    temperatures, seeds, positions, truncation = settings
    if not logits.is_cuda:
        return sample_tokens(logits, temperatures, seeds, positions, truncation)
    # Use the kernel of the CUDA graphs, because other implementations' logarithms may differ in the last bit.
    limits = None if truncation is None else truncation.on(logits)
    t, s, p = (on_device(array, logits.device) for array in (temperatures, seeds, positions))
    return kernel.sample_tokens(logits, t, s, p, limits)


def scores(logits: Tensor, settings: RowSettings) -> Tensor:
    """Return logits over temperature, float32 [M, V], with -inf for tokens that truncation drops."""
    divided = logits / divisors(on_device(settings.temperatures, logits.device)).to(logits)[:, None]
    return divided if settings.truncation is None else truncate(divided, settings.truncation)


def probabilities(logits: Tensor, settings: RowSettings) -> Tensor:
    """Return the distribution that each row is sampled from, float32 [M, V]."""
    return torch.softmax(scores(logits, settings), dim=-1)
