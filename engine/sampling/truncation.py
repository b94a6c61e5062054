"""Truncation of a distribution: min-p, top-k, top-p.

Each keeps the tokens with at least a certain score, so all three reduce to one lowest score per row. Tokens with equal
scores are kept or dropped together, so the result does not depend on the order of sorting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.executor.transfer import on_device
from engine.scheduling.request import GREEDY_BELOW

WORKSPACE_BYTES = 1 << 28
"""Memory for temporaries; rows that need more are processed in parts."""
BYTES_PER_ENTRY = 64
"""Upper bound of temporary memory per logit, in bytes, including that of PyTorch's sort."""


@dataclass(frozen=True, eq=False)
class Truncation:
    """The settings of M rows on the host, with the meanings and ranges of `SamplingParams`."""

    top_k: np.ndarray
    """int64 [M]; 0 or less keeps all tokens."""
    top_p: np.ndarray
    """float64 [M]."""
    min_p: np.ndarray
    """float64 [M]."""

    def rows(self, rows: np.ndarray) -> Truncation:
        """Return the settings of some rows."""
        return Truncation(self.top_k[rows], self.top_p[rows], self.min_p[rows])

    def on(self, scores: Tensor) -> Limits:
        """Return the settings on the device of the scores, float32 [M, V]."""
        top_k, top_p, min_p = (on_device(array, scores.device) for array in (self.top_k, self.top_p, self.min_p))
        return Limits(top_k, top_p, min_p, self.max_ranked(scores.shape[1]))

    def max_ranked(self, vocab_size: int) -> int:
        """Return the number of tokens to sort, see `Limits.max_ranked`."""
        ranked = (self.top_k > 0) | (self.top_p < 1)
        kept = np.where(self.top_k > 0, np.minimum(self.top_k, vocab_size), vocab_size)
        return int(kept.max(initial=0, where=ranked))


class Limits(NamedTuple):
    """Truncation settings as tensors on the device."""

    top_k: Tensor
    """int64 [M]."""
    top_p: Tensor
    """float64 [M]."""
    min_p: Tensor
    """float64 [M]."""
    max_ranked: int
    """Number of tokens to sort per row: the largest number that a row with top-k or top-p may keep; 0 if there is
    none."""


def truncate(scores: Tensor, settings: Truncation) -> Tensor:
    """Return logits over temperature, `scores`, float32 [M, V], with -inf for the tokens that are dropped."""
    lowest = lowest_scores(scores, torch.ones(len(scores), device=scores.device), settings.on(scores))
    return scores.masked_fill(scores < lowest[:, None], float("-inf"))


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
