"""Sampling with keyed noise: random numbers that depend only on seed, position and token; truncation before it; and the
settings of rows of processed logits, each with those of its request.

Gumbel-max trick: the token of the largest logit / temperature + Gumbel noise is a sample from the softmax. Because the
noise is keyed by (seed, position), the token at a position is the same in every batch, with or without drafts.

Min-p, top-k and top-p each keep the tokens with at least a certain score, so all three reduce to one lowest score per
row. Tokens with equal scores are kept or dropped together, so the result does not depend on the order of sorting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.executor.transfer import on_device
from engine.scheduling.request import GREEDY_BELOW, SamplingParams
from ssd.kernels.jit import Doubles, FloatRows, FloatsOut, Longs, Nothing, kernel
from ssd.kernels.noise import Sampling, bits_of, gumbel, key_at

WORKSPACE_BYTES = 1 << 28
"""Memory for temporaries; rows that need more are processed in parts."""
BYTES_PER_ENTRY = 64
"""Upper bound of temporary memory per logit, in bytes, including that of PyTorch's sort."""
GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15: the increment of SplitMix64 (Steele, Lea and Flood, 2014)
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
LOG2_E = 1 / math.log(2)


class Limits(NamedTuple):
    """Truncation settings of M rows, with the meanings and ranges of `SamplingParams`."""

    top_k: Tensor
    """int64 [M]; 0 or less keeps all tokens."""
    top_p: Tensor
    """float64 [M]."""
    min_p: Tensor
    """float64 [M]."""
    max_ranked: int
    """Number of tokens to sort per row: the largest number that a row with top-k or top-p may keep; 0 if there is
    none."""


class RowSettings(NamedTuple):
    """Sampling settings of M rows, on the device of their logits: the arguments of `sample_tokens` after the logits."""

    temperatures: Tensor
    """float64 [M]; 0 for greedy."""
    seeds: Tensor
    """int64 [M]."""
    positions: Tensor
    """int64 [M]: position of each sampled token within its sequence."""
    limits: Limits | None
    """None if no row is truncated."""


def row_settings(
    samplings: SequenceOf[SamplingParams], counts: np.ndarray, positions: np.ndarray, logits: Tensor
) -> RowSettings:
    """Return the settings of the rows of logits, float32 [M, V].

    counts: int64 [n], rows of each of `samplings`. positions: int64 [M].
    """

    def column(name: str, dtype: Any) -> Tensor:
        values = np.array([getattr(sampling, name) for sampling in samplings], dtype)
        return on_device(np.repeat(values, counts), logits.device)

    limits = None
    if any(sampling.truncates for sampling in samplings):
        columns = (column("top_k", np.int64), column("top_p", np.float64), column("min_p", np.float64))
        limits = Limits(*columns, max_ranked(samplings, logits.shape[1]))
    temperatures, seeds = column("temperature", np.float64), column("seed", np.int64)
    return RowSettings(temperatures, seeds, on_device(positions, logits.device), limits)


def max_ranked(samplings: Iterable[SamplingParams], vocab_size: int) -> int:
    """Return `Limits.max_ranked` of rows with these settings."""
    kept = (
        min(sampling.top_k, vocab_size) if sampling.top_k > 0 else vocab_size
        for sampling in samplings
        if sampling.top_k > 0 or sampling.top_p < 1
    )
    return max(kept, default=0)


def truncate(scores: Tensor, limits: Limits) -> Tensor:
    """Return logits over temperature, `scores`, float32 [M, V], with -inf for the tokens that are dropped."""
    lowest = lowest_scores(scores, torch.ones(len(scores), device=scores.device), limits)
    return scores.masked_fill(scores < lowest[:, None], float("-inf"))


def scores(logits: Tensor, settings: RowSettings) -> Tensor:
    """Return logits over temperature, float32 [M, V], with -inf for tokens that truncation drops."""
    divided = logits / divisors(settings.temperatures).to(logits)[:, None]
    return divided if settings.limits is None else truncate(divided, settings.limits)


def probabilities(logits: Tensor, settings: RowSettings) -> Tensor:
    """Return the distribution that each row is sampled from, float32 [M, V]."""
    return torch.softmax(scores(logits, settings), dim=-1)


def lowest_scores(logits: Tensor, temperatures: Tensor, limits: Limits) -> Tensor:
    """Return the lowest score that each row keeps, float32 [M], without waiting for the device.

    If any row needs sorting, all rows are sorted. logits: float32 [M, V]. temperatures: float [M].
    """
    # Division is monotonic even with rounding, so only the largest logits are divided.
    divisor = divisors(temperatures).to(logits)
    highest = logits.amax(dim=-1) / divisor
    lowest = highest + torch.log(limits.min_p).to(highest)
    if not limits.max_ranked:
        return lowest
    count = min(limits.max_ranked, logits.shape[1])
    columns = (logits, divisor, lowest, limits.top_k, limits.top_p, limits.min_p)
    # On the CPU all tokens are sorted, however few are needed.
    size = rows_per_part(logits.shape[1] if logits.device.type == "cpu" else count)
    ranked = [
        _ranked_score(_highest(part, count) / own_divisor[:, None], own_lowest, Limits(top_k, top_p, min_p, count))
        for part, own_divisor, own_lowest, top_k, top_p, min_p in zip(
            *(column.split(size) for column in columns), strict=True
        )
    ]
    return torch.where((limits.top_k > 0) | (limits.top_p < 1), torch.cat(ranked), lowest)


def divisors(temperatures: Tensor) -> Tensor:
    """Return the divisors of logits, [M]: the temperatures, 1 for greedy rows."""
    return torch.where(temperatures > GREEDY_BELOW, temperatures, 1)


def rows_per_part(entries: int) -> int:
    """Return the number of rows of `entries` logits whose temporaries fit into `WORKSPACE_BYTES`, at least 1."""
    return max(1, WORKSPACE_BYTES // (BYTES_PER_ENTRY * max(1, entries)))


def _ranked_score(best: Tensor, lowest: Tensor, limits: Limits) -> Tensor:
    """Return the score of the last token that top-k and top-p keep among those above `lowest`, float32 [M].

    best: the highest scores of each row in descending order.
    """
    kept = torch.where(limits.top_k > 0, limits.top_k, best.shape[1])
    share = torch.where(limits.top_p < 1, limits.top_p, float("inf"))  # 1 keeps what rounding would lose
    # Sum from the most likely token on, so that sums do not depend on the other rows.
    weights = torch.exp((best - best[:, :1]).double())
    is_kept = torch.arange(best.shape[1], device=best.device) < kept[:, None]
    weights = weights.masked_fill(~is_kept | (best < lowest[:, None]), 0)
    mass = weights.cumsum(dim=-1)
    # The token that reaches the share is kept, so compare the mass before it.
    enough = share[:, None] * mass[:, -1:]
    # A row of NaN keeps no token; it must not affect the other rows.
    last = (((mass - weights < enough) & (weights > 0)).sum(dim=-1) - 1).clamp(min=0)
    return best.gather(1, last[:, None])[:, 0]


def _highest(scores: Tensor, size: int) -> Tensor:
    """Return the `size` highest scores of each row in descending order."""
    if scores.device.type == "cpu":
        # NumPy's vectorized sort is 20 times as fast as PyTorch's.
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)[:, : -size - 1 : -1].copy())
    return scores.topk(size, dim=-1).values


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
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, limits: Limits | None = None
) -> Tensor:
    """Return the target's token for each row of logits, int64 [M]: greedy, or with noise keyed by seed and position.

    logits: float32 [M, V], each row contiguous. temperatures: float64 [M], 0 for greedy. seeds: int64 [M]. positions:
    int64 [M], of the sampled tokens within their sequences. limits: None if no row is truncated.
    """
    if not logits.is_cpu:
        return sample_tokens_on_device(logits, temperatures, seeds, positions, limits)
    lowest = torch.full((len(logits),), float("-inf"))
    if limits is not None and (is_sampled := temperatures > GREEDY_BELOW).any():
        top_k, top_p, min_p = (column[is_sampled] for column in (limits.top_k, limits.top_p, limits.min_p))
        own_limits = Limits(top_k, top_p, min_p, limits.max_ranked)
        lowest[is_sampled] = lowest_scores(logits[is_sampled], temperatures[is_sampled], own_limits)
    chosen = np.empty(len(logits), np.int64)
    rows, own_temperatures, own_seeds, own_positions, own_lowest = (
        column.contiguous().numpy() for column in (logits, temperatures, seeds, positions, lowest)
    )
    _sample_rows(rows, own_temperatures, own_seeds, own_positions, own_lowest, chosen)
    return torch.from_numpy(chosen)


@kernel(FloatRows, Doubles, Longs, Longs, FloatsOut, Longs, returns=Nothing)
def _sample_rows(logits, temperatures, seeds, positions, lowest, tokens):  # type: ignore[no-untyped-def]
    """Write the token of each row. The noise is only computed where it may be large enough, which few tokens reach."""
    for row in range(len(logits)):
        is_sampled = temperatures[row] > GREEDY_BELOW
        divisor = np.float32(temperatures[row] if is_sampled else 1.0)
        key = key_at(Sampling(True, seeds[row], np.int64(0)), positions[row])
        token, best = 0, np.float32(-np.inf)
        for candidate in range(logits.shape[1]):
            score = logits[row, candidate] / divisor
            if is_sampled and score > -np.inf:
                if score < lowest[row]:
                    continue
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
    """Return the same tokens as `sample_tokens`, without waiting for the device: all rows run the same operations."""
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
