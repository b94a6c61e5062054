"""Grow draft trees from a table of successors: a kernel for all sequences of a batch."""

from __future__ import annotations

import numpy as np

from ssd.kernels.jit import Bool, FloatRows, FloatsOut, Int, LongRows, Longs, kernel
from ssd.types import ROOT

EMPTY = -1
"""Value in the table of successors after the last successor of a token."""


@kernel(
    Longs, Longs, Longs, LongRows, FloatRows, FloatsOut, FloatRows, Bool, Longs, Longs, FloatsOut, Longs, returns=Int
)  # fmt: skip
def grow_trees(
    last: np.ndarray,
    rooms: np.ndarray,
    is_sampled: np.ndarray,
    successors: np.ndarray,
    scores: np.ndarray,
    edges: np.ndarray,
    rates: np.ndarray,
    is_path: bool,
    tokens: np.ndarray,
    parents: np.ndarray,
    accept_prob: np.ndarray,
    lengths: np.ndarray,
) -> int:
    """Draft for B sequences, and return the number of draft tokens T: repeatedly add the likeliest successor of a node.

    Inputs: last, int64 [B], the last token of each sequence. rooms, int64 [B], largest length of each draft.
    successors, int64 [V, k], `EMPTY` after the last one. scores, float32 [V, k], of the successors. edges, float32 [E],
    ascending bounds of intervals of scores. rates, float32 [2 * D, E + 1]: `accept_prob` by interval at depths 1 to D,
    for greedy requests, then for sampled ones; deeper nodes have that of D. is_sampled, int64 [B]: 0 or 1. is_path:
    extend only the last node.

    Outputs: tokens, parents and accept_prob, at least the sum of `rooms` each, and lengths, as in `DraftBatch`.
    """
    width = successors.shape[1]
    depths = len(rates) // 2
    most = 0
    for index in range(len(rooms)):
        most = max(most, rooms[index])
    # Candidates in the order in which they were found; those that were added to the draft have a path_prob of -1.
    candidates = np.empty((most * width + 1, 3), np.int64)
    conditional = np.empty(most * width + 1, np.float32)
    whole = np.empty(most * width + 1, np.float64)
    total = 0
    for index in range(len(last)):
        token, parent, depth, path_prob = last[index], ROOT, 1, 1.0
        found = count = 0
        while count < rooms[index]:
            if is_path:
                found = 0
            row = is_sampled[index] * depths + min(depth, depths) - 1
            for rank in range(width):
                successor = successors[token, rank]
                if successor == EMPTY:
                    break
                interval = np.searchsorted(edges, scores[token, rank], side="right")
                candidates[found, 0], candidates[found, 1], candidates[found, 2] = successor, parent, depth
                conditional[found] = rates[row, interval]
                whole[found] = path_prob * conditional[found]
                found += 1
            best = -1
            for place in range(found):
                if whole[place] >= 0 and (best < 0 or whole[place] > whole[best]):
                    best = place
            if best < 0:
                break
            token, parent, path_prob = candidates[best, 0], count, whole[best]
            tokens[total + count], parents[total + count] = token, candidates[best, 1]
            accept_prob[total + count] = conditional[best]
            depth = candidates[best, 2] + 1
            whole[best] = -1.0
            count += 1
        lengths[index] = count
        total += count
    return total
