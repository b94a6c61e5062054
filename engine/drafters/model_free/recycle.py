"""Token Recycling (Luo et al., 2024): draft from the successors that the target found likely when it last saw a token.

A table has the k most likely successors of each token, from the target's logits after the token's last verified
occurrence, accepted or not, in any request that may be learned. The original grows a fixed tree from it. Here the tree
is grown best-first by `path_prob`: the share of a successor among the k is its score, and `AcceptanceTable` converts
scores to probabilities. No weights and no text are stored.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from engine.drafters.base import Drafter, Drafts, TargetOutputs
from engine.drafters.calibration import EDGES, AcceptanceTable
from engine.drafters.model_free.recycle_tree import EMPTY, grow_trees
from engine.drafters.sources import DraftSource
from engine.scheduling.plan import SequenceResult, StepPlan, StepResult
from ssd.types import DraftBatch, offsets_of

SUCCESSORS = 8
"""Number of successors of a token, as in the paper."""


class RecycleDrafter(Drafter):
    """Drafts trees from one table of successors that all sequences share."""

    def __init__(self, vocab_size: int, *, has_trees: bool) -> None:
        """has_trees: draft trees instead of paths."""
        width = min(SUCCESSORS, vocab_size)
        self.needs = TargetOutputs(top_k=width)
        self._has_trees = has_trees
        self._successors = np.full((vocab_size, width), EMPTY, np.int64)
        self._scores = np.zeros((vocab_size, width), np.float32)
        self._table = AcceptanceTable()

    def propose(self, plan: StepPlan) -> Drafts:
        """See `Drafter.propose`."""
        entries = plan.producing
        last = np.array([entry.sequence.tokens[-1] for entry in entries], np.int64)
        rooms = np.array([entry.draft_room for entry in entries], np.int64)
        is_sampled = np.array([entry.sequence.request.sampling.is_sampled for entry in entries], np.int64)
        size = int(rooms.sum())
        tokens, parents, lengths = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(len(entries), np.int64)
        accept_prob = np.empty(size, np.float32)
        total = grow_trees(
            last, rooms, is_sampled, self._successors, self._scores, EDGES.astype(np.float32), self._table.rates,
            not self._has_trees, tokens, parents, accept_prob, lengths,
        )  # fmt: skip
        source = np.full(total, DraftSource.RECYCLE, np.uint8)
        drafted = tokens[:total].astype(np.uint32), parents[:total].astype(np.int32), accept_prob[:total]
        return Drafts(DraftBatch(*drafted, source, offsets_of(lengths)))

    def observe(self, result: StepResult) -> None:
        """Learn which successors were the target's tokens, then the successors of all verified tokens.

        The table keeps nothing of requests that may not be learned, because drafts of other requests come from it.
        """
        producing = [each for each in result.results if len(each.tokens)]
        for is_sampled in (False, True):
            own = [each for each in producing if each.plan.sequence.request.sampling.is_sampled == is_sampled]
            if own:
                self._calibrate(is_sampled, own)
        if remembered := [each for each in producing if each.plan.sequence.request.learn]:
            self._update(remembered)

    def _calibrate(self, is_sampled: bool, results: SequenceOf[SequenceResult]) -> None:
        """Compare the successors of each token before a committed one with it, whether they were drafted or not."""
        counts = [len(each.tokens) for each in results]
        before = np.concatenate(
            [each.plan.sequence.tokens[-1 - count : -1] for each, count in zip(results, counts, strict=True)]
        )
        committed = np.concatenate([each.tokens for each in results])
        depths = np.concatenate([np.arange(1, count + 1) for count in counts])
        successors = self._successors[before]
        exists = successors != EMPTY
        self._table.observe(
            is_sampled,
            self._scores[before][exists],
            np.broadcast_to(depths[:, None], exists.shape)[exists],
            (successors == committed[:, None])[exists],
        )

    def _update(self, results: SequenceOf[SequenceResult]) -> None:
        """Store the most likely successors of the last committed token and of all draft tokens of each sequence."""
        tokens = np.concatenate([_verified_tokens(each) for each in results])
        top_tokens = torch.cat([each.top_tokens for each in results if each.top_tokens is not None]).cpu().numpy()
        top_logits = torch.cat([each.top_logits for each in results if each.top_logits is not None]).cpu().numpy()
        scores = np.exp(top_logits - top_logits[:, :1])
        scores /= scores.sum(axis=1, keepdims=True)
        # If a token occurs several times, its last row remains.
        order = np.argsort(np.concatenate([_is_accepted(each) for each in results]), kind="stable")
        self._successors[tokens[order]] = top_tokens[order]
        self._scores[tokens[order]] = scores[order]


def _verified_tokens(result: SequenceResult) -> np.ndarray:
    """Return the tokens whose successors the target computed: the last committed one and the draft, uint32 [1 + k]."""
    return np.append(result.plan.sequence.tokens[-1 - len(result.tokens)], result.plan.draft)


def _is_accepted(result: SequenceResult) -> np.ndarray:
    """Return which of the verified tokens are part of the text, bool [1 + k]."""
    is_accepted = np.zeros(1 + result.drafted, np.bool_)
    is_accepted[0] = True
    is_accepted[1 + result.kept] = True
    return is_accepted
