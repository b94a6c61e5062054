"""Sampling with keyed noise: random numbers that depend only on seed, position and token.

Gumbel-max trick: the token of the largest logit / temperature + Gumbel noise is a sample from the softmax. Because the
noise is keyed by (seed, position), the token at a position is the same in every batch, with or without drafts.
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from engine.executor.transfer import on_device
from engine.sampling.truncation import Limits, Truncation, divisors, lowest_scores, rows_per_part, truncate
from engine.scheduling.request import GREEDY_BELOW
from ssd.kernels.jit import Doubles, FloatRows, Longs, Nothing, kernel
from ssd.kernels.noise import Sampling, bits_of, gumbel, key_at

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15: the increment of SplitMix64 (Steele, Lea and Flood, 2014)
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


class Stream(IntEnum):
    """Independent streams of random numbers besides the one that samples the target's tokens."""

    DRAFT = 1
    """Sample a drafter's token, in rejection mode."""
    ACCEPT = 2
    """Decide whether a draft token is accepted."""


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return the token of the largest logit of each row, int64 [M]. logits: float32 [M, V]."""
    return logits.argmax(dim=-1)


def sample_tokens(
    logits: Tensor,
    temperatures: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
    truncation: Truncation | None = None,
) -> Tensor:
    """Sample a token per row, int64 [M]. The settings are on the host, so that only sampled rows need noise.

    logits: float32 [M, V]. temperatures: float64 [M], 0 for greedy. seeds: int64 [M]. positions: int64 [M], of the
    sampled token within its sequence.
    """
    if truncation is None and logits.device.type == "cpu":
        chosen = np.empty(len(logits), np.int64)
        _sample_rows(logits.contiguous().numpy(), temperatures, seeds, positions, chosen)
        return torch.from_numpy(chosen)
    tokens = greedy_tokens(logits)
    sampled = np.flatnonzero(temperatures > GREEDY_BELOW)
    size = rows_per_part(logits.shape[1])
    for part in (sampled[first : first + size] for first in range(0, len(sampled), size)):
        rows, divisor, own_seeds, own_positions = (
            on_device(array, logits.device) for array in (part, temperatures[part], seeds[part], positions[part])
        )
        scores = logits[rows] / divisor.to(logits)[:, None]
        if truncation is None:
            scores += gumbel_noise(own_seeds, own_positions, logits.shape[1])
        else:
            # Noise dominates the cost, so compute it only for the tokens that truncation keeps.
            scores = truncate(scores, truncation.rows(part))
            left, candidates = torch.nonzero(scores > float("-inf"), as_tuple=True)
            scores[left, candidates] += _noise(_keys(own_seeds, own_positions)[left], candidates)
        tokens[rows] = greedy_tokens(scores)
    return tokens


LOG2_E = 1 / math.log(2)


@kernel(FloatRows, Doubles, Longs, Longs, Longs, returns=Nothing)
def _sample_rows(logits, temperatures, seeds, positions, tokens):  # type: ignore[no-untyped-def]
    """Write the token of each row. The noise is only computed where it may be large enough, which few tokens reach."""
    for row in range(len(logits)):
        is_sampled = temperatures[row] > GREEDY_BELOW
        divisor = np.float32(temperatures[row] if is_sampled else 1.0)
        key = key_at(Sampling(True, seeds[row], np.int64(0)), positions[row])
        token, best = 0, np.float32(-np.inf)
        for candidate in range(logits.shape[1]):
            score = logits[row, candidate] / divisor
            if is_sampled and score > -np.inf:
                # Noise above x has a random number below exp(-x), hence below this power of two.
                octaves = max(np.float32(0.0), (best - score) * np.float32(LOG2_E) - np.float32(0.01))
                if octaves >= 33.0:
                    continue
                bits = bits_of(key, candidate)
                if bits >> (np.uint64(32) - np.uint64(min(octaves, np.float32(32.0)))):
                    continue
                score += np.float32(gumbel(bits))
            if score > best:
                token, best = candidate, score
        tokens[row] = token


def sample_tokens_on_device(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, limits: Limits | None = None
) -> Tensor:
    """Sample the same tokens with settings on the device, without waiting for it: all rows run the same operations.

    logits: float32 [M, V]. temperatures: float64 [M]. seeds, positions: int64 [M]. Returns int64 [M].
    """
    if limits is None:
        lowest = torch.full_like(temperatures, float("-inf"))
    else:
        lowest = lowest_scores(logits, temperatures, limits)
    columns = (logits, temperatures, seeds, positions, lowest.to(logits))
    size = rows_per_part(logits.shape[1])
    return torch.cat([_sample(*part) for part in zip(*(column.split(size) for column in columns), strict=True)])


def _sample(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, lowest: Tensor) -> Tensor:
    scores = logits / divisors(temperatures).to(logits)[:, None]
    scores.masked_fill_(scores < lowest[:, None], float("-inf"))
    scores += gumbel_noise(seeds, positions, logits.shape[1])
    return torch.where(temperatures > GREEDY_BELOW, greedy_tokens(scores), greedy_tokens(logits))


def stream_seeds(seeds: Tensor, stream: Stream) -> Tensor:
    """Return the seeds of a separate stream of random numbers for the seeds of sequences, int64 [M] each."""
    return mix64(mix64(seeds) + torch.full_like(seeds, stream) * MIX_2)


def uniforms(seeds: Tensor, positions: Tensor, ranks: Tensor) -> Tensor:
    """Return uniform numbers in the open interval (0, 1), float64 [M]; keys: int64 [M] each."""
    return _uniforms(_keys(seeds, positions) + (ranks + 1) * GOLDEN)


def gumbel_noise(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """Return standard Gumbel noise, float32 [M, size], keyed by seeds and positions, int64 [M] each."""
    return _noise(_keys(seeds, positions)[:, None], torch.arange(size, device=seeds.device))


def gumbel_noise_of(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return the noise of some tokens, float32 [M, n]; seeds and positions: int64 [M], tokens: int64 [M, n]."""
    return _noise(_keys(seeds, positions)[:, None], tokens)


def _keys(seeds: Tensor, positions: Tensor) -> Tensor:
    return mix64(mix64(seeds) + positions * GOLDEN)


def _noise(keys: Tensor, tokens: Tensor) -> Tensor:
    # Small uniforms give large noise; log1p keeps their precision.
    return -torch.log(-torch.log1p(-_uniforms(keys + (tokens + 1) * GOLDEN))).float()


def _uniforms(numbers: Tensor) -> Tensor:
    return (_shifted_right(mix64(numbers), 32).double() + 0.5) * 2.0**-32


def mix64(x: Tensor) -> Tensor:
    """Return SplitMix64's finalizer of int64 tensors, with unsigned overflow."""
    x = (x ^ _shifted_right(x, 30)) * MIX_1
    x = (x ^ _shifted_right(x, 27)) * MIX_2
    return x ^ _shifted_right(x, 31)


def _shifted_right(x: Tensor, by: int) -> Tensor:
    """Logical right shift; PyTorch's is arithmetic."""
    return (x >> by) & ((1 << (64 - by)) - 1)
