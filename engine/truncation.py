"""Which tokens are likely enough to be drawn: min-p, top-k, top-p.

Each keeps the tokens above some score, so the three together are one floor for each row. Tokens that score the same
are kept or dropped together; so the outcome depends on no order of sorting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device.transfer import on_device


@dataclass(frozen=True, eq=False)
class Truncation:
    """The settings of M rows, with the meanings and ranges that `SamplingParams` gives them."""

    top_k: np.ndarray
    """int64 [M]: 0 or less is all."""
    top_p: np.ndarray
    """float64 [M]."""
    min_p: np.ndarray
    """float64 [M]."""

    def rows(self, rows: np.ndarray) -> Truncation:
        """Those of some rows."""
        return Truncation(self.top_k[rows], self.top_p[rows], self.min_p[rows])

    def on(self, scores: Tensor) -> Limits:
        """The same where the scores are, float32 [M, V]."""
        top_k, top_p, min_p = (on_device(array, scores.device) for array in (self.top_k, self.top_p, self.min_p))
        return Limits(top_k, top_p, min_p, self.most(scores.shape[1]))

    def most(self, vocab: int) -> int:
        """Tokens to be ranked, see `Limits.most`."""
        ranked = (self.top_k > 0) | (self.top_p < 1)
        kept = np.where(self.top_k > 0, np.minimum(self.top_k, vocab), vocab)
        return int(kept.max(initial=0, where=ranked))


class Limits(NamedTuple):
    """The same on the device."""

    top_k: Tensor
    """int64 [M]."""
    top_p: Tensor
    """float64 [M]."""
    min_p: Tensor
    """float64 [M]."""
    most: int
    """Tokens to be ranked: as many as any of the rows may keep, if it has a top-k or top-p; 0 if none has."""


def truncate(scores: Tensor, limits: Truncation) -> Tensor:
    """`scores`, float32 [M, V], logits over temperature, with -inf for the tokens that are not to be drawn."""
    floor = _floor(scores, on_device(limits.min_p, scores.device))
    ranked = np.flatnonzero((limits.top_k > 0) | (limits.top_p < 1))
    if len(ranked):
        rows = on_device(ranked, scores.device)
        floor[rows] = _floor_of_ranks(scores[rows], floor[rows], limits.rows(ranked).on(scores))
    return scores.masked_fill(scores < floor[:, None], float("-inf"))


def truncate_all(scores: Tensor, limits: Limits) -> Tensor:
    """The same, without waiting for the device: all rows are ranked if any needs it."""
    floor = _floor(scores, limits.min_p)
    if limits.most:
        is_ranked = (limits.top_k > 0) | (limits.top_p < 1)
        floor = torch.where(is_ranked, _floor_of_ranks(scores, floor, limits), floor)
    return scores.masked_fill(scores < floor[:, None], float("-inf"))


def _floor(scores: Tensor, min_p: Tensor) -> Tensor:
    return scores.amax(dim=-1) + torch.log(min_p).to(scores)


def _floor_of_ranks(scores: Tensor, floor: Tensor, limits: Limits) -> Tensor:
    """The score of the last token that top-k and top-p keep of those above `floor`, float32 [M]."""
    kept = torch.where(limits.top_k > 0, limits.top_k, scores.shape[1])
    share = torch.where(limits.top_p < 1, limits.top_p, float("inf"))  # 1 keeps what rounding would lose
    best = _best(scores, min(limits.most, scores.shape[1]))
    # Sums run from the likeliest token on, so that they do not depend on the rows beside this one.
    weights = torch.exp((best - best[:, :1]).double())
    is_kept = torch.arange(best.shape[1], device=best.device) < kept[:, None]
    weights = weights.masked_fill(~is_kept | (best < floor[:, None]), 0)
    mass = weights.cumsum(dim=-1)
    # The token that crosses the share is kept: what counts is the mass before it.
    enough = share[:, None] * mass[:, -1:]
    # Of scores that are no numbers none is kept; such a row must not break those beside it.
    last = (((mass - weights < enough) & (weights > 0)).sum(dim=-1) - 1).clamp(min=0)
    return best.gather(1, last[:, None])[:, 0]


def _best(scores: Tensor, size: int) -> Tensor:
    """The `size` highest scores of each row, best first."""
    if scores.device.type == "cpu":
        # NumPy's vectorised sort is 20 times as fast as PyTorch's.
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)[:, : -size - 1 : -1].copy())
    return scores.topk(size, dim=-1).values
