"""Which tokens are likely enough to be drawn: min-p, top-k, top-p.

Each keeps the tokens above some score, so the three together are one floor for each row. Tokens that score the same
are kept or dropped together; so the outcome depends on no order of sorting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


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


def truncate(scores: Tensor, limits: Truncation) -> Tensor:
    """`scores`, float32 [M, V], logits over temperature, with -inf for the tokens that are not to be drawn."""
    floor = scores.amax(dim=-1) + torch.log(torch.from_numpy(limits.min_p)).to(scores)
    ranked = np.flatnonzero((limits.top_k > 0) | (limits.top_p < 1))
    if len(ranked):
        rows = torch.from_numpy(ranked).to(scores.device)
        floor[rows] = _floor_of_ranks(scores[rows], floor[rows], limits.rows(ranked))
    return scores.masked_fill(scores < floor[:, None], float("-inf"))


def _floor_of_ranks(scores: Tensor, floor: Tensor, limits: Truncation) -> Tensor:
    """The score of the last token that top-k and top-p keep of those above `floor`, float32 [M]."""
    size = scores.shape[1]
    kept = np.where(limits.top_k > 0, np.minimum(limits.top_k, size), size)
    share = np.where(limits.top_p < 1, limits.top_p, np.inf)  # 1 keeps what rounding would lose
    best = _best(scores, int(kept.max()))
    # Sums run from the likeliest token on, so that they do not depend on the rows beside this one.
    weights = torch.exp((best - best[:, :1]).double())
    is_kept = torch.arange(best.shape[1], device=best.device) < torch.from_numpy(kept).to(best.device)[:, None]
    weights = weights.masked_fill(~is_kept | (best < floor[:, None]), 0)
    mass = weights.cumsum(dim=-1)
    # The token that crosses the share is kept: what counts is the mass before it.
    enough = torch.from_numpy(share).to(best.device)[:, None] * mass[:, -1:]
    last = ((mass - weights < enough) & (weights > 0)).sum(dim=-1) - 1
    return best.gather(1, last[:, None])[:, 0]


def _best(scores: Tensor, size: int) -> Tensor:
    """The `size` highest scores of each row, best first."""
    if scores.device.type == "cpu":
        # NumPy's vectorised sort is 20 times as fast as PyTorch's.
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)[:, : -size - 1 : -1].copy())
    return scores.topk(size, dim=-1).values
