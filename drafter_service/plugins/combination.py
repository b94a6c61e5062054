"""Combine the drafts of a host's own network, such as EAGLE or MTP, with those of the corpus.

For each request, both drafts and what the corpus finds after each token of the network's are merged into one tree, as
in the engine's combinations (`ssd.merged_tree`). The path with the largest expected number of accepted tokens is
verified, as far as the token budget finds its tokens worth their time. The probability that a token of the network is
accepted is learned by its position.

This module imports numba, the other modules of the session do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from drafter_service.plugins.draft import Draft, Proposed, TrackedRequest, Turn, common_length, drafts_of, path_of
from drafter_service.plugins.options import HostLimits
from ssd.acceptance import AcceptanceTable
from ssd.budget.curve import StepCurve
from ssd.budget.token_budget import TokenBudget
from ssd.merged_tree import Mix, Tree, best_path
from ssd.types import ROOT, DraftBatch, Progress, offsets_of

CORPUS, NETWORK = range(2)
"""Sources of the nodes of a tree."""
MAX_NODES = 96
"""Largest number of nodes of a tree."""
SCORE = 0.65
"""Score of all tokens of the network, because hosts give no probabilities: their acceptance before any is observed."""

DraftAfter = Callable[[Progress], DraftBatch]
"""See `ssd.types.Drafter.draft_after`."""


class Combination:
    """Chooses among the drafts of a host's requests, and learns from what became of them."""

    def __init__(self, limits: HostLimits, vocab_size: int, *, withholds: bool) -> None:
        """vocab_size: token ids are below this. withholds: whether the network's drafts are verified as they are."""
        self._max_draft, self._vocab_size, self._withholds = limits.max_draft, vocab_size, withholds
        self._mix, self._table = Mix(2), AcceptanceTable()
        self._budget = TokenBudget(StepCurve.unknown(limits.padding))
        self._least = 1.0
        """Smallest path probability of a draft token in the next step."""

    def record_step(self, tokens: int, sequences: int, seconds: float) -> None:
        """Record a step of the host, as `HostSession.record_step`."""
        self._budget.curve.record(tokens, sequences, seconds)

    def min_path_prob(self, turns: Sequence[Turn], others: int, prompt_tokens: int) -> float:
        """Return the smallest path probability of a draft token in the next step.

        others, prompt_tokens: numbers of other sequences and of prompt tokens in that step.
        """
        if grown := [turn for turn in turns if turn.added]:
            committed = sum(len(turn.added) / turn.steps for turn in grown)
            self._budget.record(len(grown), committed, sum(turn.verified for turn in grown))
        self._budget.prepare(len(turns) + others, prompt_tokens)
        self._least = self._budget.price(sum(turn.room for turn in turns)).min_path_prob
        return self._least

    def choose(
        self, turns: Sequence[Turn], batch: DraftBatch, drafts: Sequence[Draft], draft_after: DraftAfter
    ) -> list[Draft]:
        """Return the draft to verify for each request, and note what was proposed to it.

        batch, drafts: those of the corpus, as it returned them, and as the host can verify them.
        """
        trees, paths = [], []
        probs = self._table.accept_prob(np.array([False]), np.array([SCORE]), np.arange(1, self._max_draft + 1))
        for turn, draft, first in zip(turns, drafts, batch.offsets.tolist(), strict=False):
            tree, size = extended(Tree.empty(MAX_NODES, 2), batch, first, len(draft)), len(turn.network)
            tree, path = tree.add(np.array(turn.network), np.arange(ROOT, size + ROOT), probs[:size], NETWORK)
            trees.append(tree)
            paths.append(path)
        self._continue(turns, trees, paths, draft_after)
        values = [self._mix.evaluate(tree) for tree in trees]
        for turn, draft, tree, value in zip(turns, drafts, trees, values, strict=True):
            turn.request.proposed = Proposed(draft.tokens, turn.network, tree, value)
        if self._withholds:
            return [path_of(turn.network) for turn in turns]
        best = [  # By what tokens are worth more than they cost, so that no path is chosen for tokens that are cut.
            best_path(tree.parents[: tree.size], np.maximum(value.path_prob - self._least, 0.0), turn.room)
            for turn, tree, value in zip(turns, trees, values, strict=True)
        ]
        path_probs = np.concatenate([value.path_prob[path] for value, path in zip(values, best, strict=True)])
        lengths = self._budget.select(path_probs, np.cumsum([0, *map(len, best)]))
        return [
            path_of(tree.tokens[path[:length]].tolist(), value.accept_prob[path[:length]].tolist())
            for tree, value, path, length in zip(trees, values, best, lengths.tolist(), strict=True)
        ]

    def learn(self, request: TrackedRequest, produced: Sequence[int]) -> None:
        """Learn from the tokens that the target produced after what was proposed to a request."""
        if (proposed := request.proposed) is None:
            return
        self._mix.learn(proposed.tree, proposed.found, np.array(produced))
        accepted = common_length(proposed.network, produced)
        # The first wrong token is the last one whose result is known.
        depths = np.arange(1, min(accepted + 1, len(proposed.network), len(produced)) + 1)
        self._table.observe(False, np.full(len(depths), SCORE), depths, depths <= accepted)

    def _continue(
        self, turns: Sequence[Turn], trees: list[Tree], paths: Sequence[np.ndarray], draft_after: DraftAfter
    ) -> None:
        """Add what the corpus finds after each token of the network's drafts that it does not propose itself."""
        places = [
            (index, end)
            for index, (turn, path) in enumerate(zip(turns, paths, strict=True))
            for end in range(1, min(len(path), turn.room - 1) + 1)
            if trees[index].probs[path[end - 1], CORPUS] < 0
        ]
        if not places:
            return
        rooms = [turns[index].room - end for index, end in places]
        batch = draft_after(
            Progress(
                sequence_ids=np.array([turns[index].request.sequence_id for index, _ in places], np.uint64),
                tokens=np.concatenate([np.array(turns[index].network[:end], np.uint32) for index, end in places]),
                offsets=offsets_of(np.array([end for _, end in places])),
                verified=np.zeros(len(places), np.uint32),
                max_draft=np.array(rooms, np.uint32),
                min_path_prob=self._least,
            )
        )
        drafts = drafts_of(batch, rooms, self._vocab_size, is_tree=False)
        for (index, end), draft, first in zip(places, drafts, batch.offsets.tolist(), strict=False):
            trees[index] = extended(trees[index], batch, first, len(draft), int(paths[index][end - 1]))


def extended(tree: Tree, batch: DraftBatch, first: int, length: int, below: int = ROOT) -> Tree:
    """Return a tree with a draft of the corpus, of `length` tokens from `first` of a batch, below a node."""
    own = slice(first, first + length)
    return tree.add(batch.tokens[own], batch.parents[own], batch.accept_prob[own], CORPUS, below)[0]
