"""Logits to tokens: greedy, or with temperature by noise that depends on nothing but seed, position and token.

Gumbel's trick: the largest of logits / temperature + Gumbel noise is a draw from their softmax. With the noise
keyed by (seed, position), the token of a position is the same in every batch, and with or without drafts.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from engine.executor.transfer import on_device
from engine.sampling.truncation import Limits, Truncation, floors_of, rows_at_a_time, truncate, warmth_of
from engine.scheduling.request import GREEDY_BELOW

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15: the increment of SplitMix64 (Steele, Lea and Flood, 2014)
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


class Stream(IntEnum):
    """What random numbers of a position are for, beside its token itself; each is independent of the others."""

    DRAFT = 1
    """What a drafter draws from its own distribution."""
    ACCEPT = 2
    """Whether that is accepted."""


def greedy_tokens(logits: Tensor) -> Tensor:
    """The token of the largest logit in each row, int64 [M]. logits: float32 [M, V]."""
    return logits.argmax(dim=-1)


def choose_tokens(
    logits: Tensor,
    temperatures: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
    truncation: Truncation | None = None,
) -> Tensor:
    """The target's token for each row of logits, by settings that the host has; it works on the rows that need it.

    logits: float32 [M, V]. temperatures: float64 [M], 0 for greedy. seeds: int64 [M]. positions: int64 [M], of the
    token to be chosen within its sequence. Returns int64 [M].
    """
    tokens = greedy_tokens(logits)
    drawn = np.flatnonzero(temperatures > GREEDY_BELOW)
    size = rows_at_a_time(logits.shape[1])
    for part in (drawn[first : first + size] for first in range(0, len(drawn), size)):
        rows, warmth, own_seeds, own_positions = (
            on_device(array, logits.device) for array in (part, temperatures[part], seeds[part], positions[part])
        )
        scores = logits[rows] / warmth.to(logits)[:, None]
        if truncation is None:
            scores += gumbel_noise(own_seeds, own_positions, logits.shape[1])
        else:
            # Noise costs more than all else here, and few tokens are left to need it.
            scores = truncate(scores, truncation.rows(part))
            left, candidates = torch.nonzero(scores > float("-inf"), as_tuple=True)
            scores[left, candidates] += _noise(_keys(own_seeds, own_positions)[left], candidates)
        tokens[rows] = greedy_tokens(scores)
    return tokens


def draw_tokens(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, limits: Limits | None = None
) -> Tensor:
    """The same tokens by settings that the device has, without waiting for it: every row takes the whole way.

    logits: float32 [M, V]. temperatures: float64 [M]. seeds, positions: int64 [M]. Returns int64 [M].
    """
    floors = torch.full_like(temperatures, float("-inf")) if limits is None else floors_of(logits, temperatures, limits)
    columns = (logits, temperatures, seeds, positions, floors.to(logits))
    size = rows_at_a_time(logits.shape[1])
    return torch.cat([_draw(*part) for part in zip(*(column.split(size) for column in columns), strict=True)])


def _draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, floors: Tensor) -> Tensor:
    scores = logits / warmth_of(temperatures).to(logits)[:, None]
    scores.masked_fill_(scores < floors[:, None], float("-inf"))
    scores += gumbel_noise(seeds, positions, logits.shape[1])
    return torch.where(temperatures > GREEDY_BELOW, greedy_tokens(scores), greedy_tokens(logits))


def stream_seeds(seeds: Tensor, stream: Stream) -> Tensor:
    """Seeds of random numbers for another purpose, int64 [M], from those of the sequences."""
    return mix64(mix64(seeds) + torch.full_like(seeds, stream) * MIX_2)


def uniforms(seeds: Tensor, positions: Tensor, ranks: Tensor) -> Tensor:
    """Uniform numbers strictly between 0 and 1, float64 [M], keyed by seeds, positions and ranks, int64 [M] each."""
    return _uniforms(_keys(seeds, positions) + (ranks + 1) * GOLDEN)


def gumbel_noise(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """Standard Gumbel noise, float32 [M, size], keyed by seeds and positions, int64 [M] each."""
    return _noise(_keys(seeds, positions)[:, None], torch.arange(size, device=seeds.device))


def _keys(seeds: Tensor, positions: Tensor) -> Tensor:
    return mix64(mix64(seeds) + positions * GOLDEN)


def _noise(keys: Tensor, tokens: Tensor) -> Tensor:
    # Small uniforms make large noise; log1p keeps their precision, where log(u) near u = 1 would lose it.
    return -torch.log(-torch.log1p(-_uniforms(keys + (tokens + 1) * GOLDEN))).float()


def _uniforms(numbers: Tensor) -> Tensor:
    return (_shifted_right(mix64(numbers), 32).double() + 0.5) * 2.0**-32


def mix64(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64 tensors, wrapping as unsigned numbers do."""
    x = (x ^ _shifted_right(x, 30)) * MIX_1
    x = (x ^ _shifted_right(x, 27)) * MIX_2
    return x ^ _shifted_right(x, 31)


def _shifted_right(x: Tensor, by: int) -> Tensor:
    """A logical shift: PyTorch's own keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
