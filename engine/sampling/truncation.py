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

from engine.executor.transfer import on_device
from engine.scheduling.request import GREEDY_BELOW

WORKSPACE = 1 << 28
"""Bytes that the temporaries of many rows may take; what has more is worked on in parts."""
BYTES_AN_ENTRY = 64
"""Of temporaries at most, with those of PyTorch's sorting."""


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
    floor = _floor(scores.amax(dim=-1), on_device(limits.min_p, scores.device))
    ranked = np.flatnonzero((limits.top_k > 0) | (limits.top_p < 1))
    if len(ranked):
        rows = on_device(ranked, scores.device)
        those = limits.rows(ranked).on(scores)
        floor[rows] = _floor_of_ranks(_best(scores[rows], those.most), floor[rows], those)
    return scores.masked_fill(scores < floor[:, None], float("-inf"))


def floors_of(logits: Tensor, temperatures: Tensor, limits: Limits) -> Tensor:
    """The lowest score that each row may draw, float32 [M], without waiting for the device: all are ranked if any is.

    logits: float32 [M, V]. temperatures: float64 [M].
    """
    # To divide keeps the order, rounded or not; so it comes last, and no scores of all tokens are needed.
    warmth = warmth_of(temperatures).to(logits)
    floors = _floor(logits.amax(dim=-1) / warmth, limits.min_p)
    if not limits.most:
        return floors
    most = min(limits.most, logits.shape[1])
    columns = (logits, warmth, floors, limits.top_k, limits.top_p, limits.min_p)
    # On the CPU all tokens are sorted, however few are wanted.
    size = rows_at_a_time(logits.shape[1] if logits.device.type == "cpu" else most)
    ranked = [
        _floor_of_ranks(_best(part, most) / own_warmth[:, None], floor, Limits(top_k, top_p, min_p, most))
        for part, own_warmth, floor, top_k, top_p, min_p in zip(
            *(column.split(size) for column in columns), strict=True
        )
    ]
    return torch.where((limits.top_k > 0) | (limits.top_p < 1), torch.cat(ranked), floors)


def warmth_of(temperatures: Tensor) -> Tensor:
    """What logits are divided by, float64 [M]: 1 for rows that are greedy."""
    return torch.where(temperatures > GREEDY_BELOW, temperatures, 1)


def rows_at_a_time(entries: int) -> int:
    """Of how many rows with so many entries each the temporaries fit into `WORKSPACE`; at least one."""
    return max(1, WORKSPACE // (BYTES_AN_ENTRY * max(1, entries)))


def _floor(highest: Tensor, min_p: Tensor) -> Tensor:
    return highest + torch.log(min_p).to(highest)


def _floor_of_ranks(best: Tensor, floor: Tensor, limits: Limits) -> Tensor:
    """The score of the last token that top-k and top-p keep of those above `floor`, float32 [M]; see `_best`."""
    kept = torch.where(limits.top_k > 0, limits.top_k, best.shape[1])
    share = torch.where(limits.top_p < 1, limits.top_p, float("inf"))  # 1 keeps what rounding would lose
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
