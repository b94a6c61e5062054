"""Token Recycling (Luo et al., 2024): draft from the successors that the target found likely when it last saw a token.

A table has the k most likely successors of each token, from the target's logits after the token's last verified
occurrence, accepted or not, in any request that may be learned. The original grows a fixed tree from it. Here the tree
is grown best-first by `path_prob`: the share of a successor among the k is its score, and `AcceptanceTable` converts
scores to probabilities. No weights and no text are stored.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from engine.drafters.base import Drafter, TargetOutputs
from engine.drafters.drafts import Drafts
from engine.drafters.sources import DraftSource
from engine.scheduling.plan import StepPlan
from engine.scheduling.result import StepResult
from engine.scheduling.table import KIND, SAMPLED
from ssd.acceptance import EDGES, AcceptanceTable
from ssd.kernels.jit import Bool, FloatRows, FloatsOut, Int, Ints, LongRows, Longs, TokensOut, fields_of, kernel
from ssd.types import ROOT, DraftBatch, offsets_of

SUCCESSORS = 8
"""Number of successors of a token, as in the paper."""


EMPTY = -1
"""Value in the table of successors after the last successor of a token."""


class Successors(NamedTuple):
    """The k likeliest successors of each of V tokens."""

    tokens: np.ndarray
    """int64 [V, k]; `EMPTY` after the last one."""
    scores: np.ndarray
    """float32 [V, k]: the share of each among them."""


class RecycleDrafter(Drafter):
    """Drafts trees from one table of successors that all sequences share."""

    def __init__(self, vocab_size: int, *, has_trees: bool) -> None:
        """has_trees: draft trees instead of paths."""
        width = min(SUCCESSORS, vocab_size)
        self.needs = TargetOutputs(top_k=width)
        self._has_trees = has_trees
        self._table = Successors(np.full((vocab_size, width), EMPTY), np.zeros((vocab_size, width), np.float32))
        self._acceptance = AcceptanceTable()

    def propose(self, plan: StepPlan) -> Drafts:
        """See `Drafter.propose`."""
        last, rooms = np.array([sequence.tokens[-1] for sequence in plan.producing], np.int64), plan.rooms
        is_sampled = (plan.table.state[plan.rows, KIND] & SAMPLED != 0).astype(np.int64)
        edges, rates = EDGES.astype(np.float32), self._acceptance.rates
        nodes = tokens, parents, accept_prob, lengths = room_for(rooms)
        total = grow_trees(last, rooms, is_sampled, self._table, edges, rates, not self._has_trees, *nodes)
        source = np.full(total, DraftSource.RECYCLE, np.uint8)
        batch = DraftBatch(tokens[:total], parents[:total], accept_prob[:total], source, offsets_of(lengths))
        return Drafts(batch)

    def observe(self, result: StepResult) -> None:
        """Learn which successors were the target's tokens, then the successors of all verified tokens.

        The table keeps nothing of requests that may not be learned, because drafts of other requests come from it.
        """
        sequences, produced = result.plan.producing, np.flatnonzero(result.lengths).tolist()
        for is_sampled in (False, True):
            own = [index for index in produced if sequences[index].request.sampling.is_sampled == is_sampled]
            if own:
                self._calibrate(is_sampled, result, own)
        if remembered := [index for index in produced if sequences[index].request.learn]:
            self._update(result, remembered)

    def _calibrate(self, is_sampled: bool, result: StepResult, indices: SequenceOf[int]) -> None:
        """Compare the successors of each token before a committed one with it, whether they were drafted or not."""
        texts = [result.plan.producing[index].tokens[-1 - result.lengths[index] :] for index in indices]
        before, committed = (np.concatenate([text[part] for text in texts]) for part in (slice(-1), slice(1, None)))
        depths = np.concatenate([np.arange(1, len(text)) for text in texts])
        successors = self._table.tokens[before]
        exists = successors != EMPTY
        self._acceptance.observe(
            is_sampled,
            self._table.scores[before][exists],
            np.broadcast_to(depths[:, None], exists.shape)[exists],
            (successors == committed[:, None])[exists],
        )

    def _update(self, result: StepResult, indices: SequenceOf[int]) -> None:
        """Store the most likely successors of the last committed token and of all draft tokens of each sequence."""
        assert result.top_tokens is not None
        assert result.top_logits is not None
        bounds = np.append(0, np.cumsum(1 + result.verified))
        rows = np.concatenate([np.arange(bounds[index], bounds[index + 1]) for index in indices])
        top_tokens, top_logits = (top.cpu().numpy()[rows] for top in (result.top_tokens, result.top_logits))
        drafted, accepted = result.plan.drafts.batch.tokens, result.is_accepted
        tokens, is_accepted = list[np.ndarray](), list[np.ndarray]()
        for index in indices:
            # The last token that was committed before, then the draft.
            last, own = result.plan.producing[index].tokens[-1 - result.lengths[index]], result.draft_of(index)
            tokens.append(np.append(last, drafted[own]))
            is_accepted.append(np.append(True, accepted[own]))
        scores = np.exp(top_logits - top_logits[:, :1])
        scores /= scores.sum(axis=1, keepdims=True)
        # If a token occurs several times, its last row remains.
        order = np.argsort(np.concatenate(is_accepted), kind="stable")
        learned = np.concatenate(tokens)[order]
        self._table.tokens[learned], self._table.scores[learned] = top_tokens[order], scores[order]


def room_for(rooms: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return arrays for what `grow_trees` writes."""
    size = int(rooms.sum())
    return np.empty(size, np.uint32), np.empty(size, np.int32), np.empty(size, np.float32), np.empty_like(rooms)


SUCCESSORS_OF = fields_of(Successors, LongRows, FloatRows)


@kernel(
    Longs, Longs, Longs, SUCCESSORS_OF, FloatsOut, FloatRows, Bool, TokensOut, Ints, FloatsOut, Longs, returns=Int
)  # fmt: skip
def grow_trees(
    last: np.ndarray,
    rooms: np.ndarray,
    is_sampled: np.ndarray,
    table: Successors,
    edges: np.ndarray,
    rates: np.ndarray,
    is_path: bool,
    tokens: np.ndarray,
    parents: np.ndarray,
    accept_prob: np.ndarray,
    lengths: np.ndarray,
) -> int:
    """Draft for B sequences, and return the number of draft tokens: repeatedly add the likeliest successor of a node.

    last: int64 [B], the last token of each sequence. rooms: int64 [B], largest length of each draft. is_sampled: int64
    [B], 0 or 1. edges: float32 [E], ascending bounds of intervals of scores. rates: float32 [2 * D, E + 1], the
    `accept_prob` by interval at depths 1 to D, for greedy requests, then for sampled ones; deeper nodes have that of D.
    is_path: extend only the last node. Writes the tokens, parents and `accept_prob` of the drafts, as in `DraftBatch`,
    to arrays with room for them, and the length of each draft to `lengths`, int64 [B].
    """
    width = table.tokens.shape[1]
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
                successor = table.tokens[token, rank]
                if successor == EMPTY:
                    break
                interval = np.searchsorted(edges, table.scores[token, rank], side="right")
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
