"""Adds drafts to a step: asks the drafter, and keeps what the step can verify and what pays."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from engine.config import EngineConfig
from engine.drafters.base import Drafts
from engine.drafters.guard import GuardedDrafter
from engine.drafters.tokens import adapt
from engine.scheduling.plan import SequencePlan, StepPlan, StepResult
from engine.scheduling.sequence import Sequence
from engine.speculation.draft_tree import DraftTree, straight_length
from engine.speculation.token_budget import TokenBudget

if TYPE_CHECKING:
    from engine.drafters.registry import AnyDrafter


class Speculation:
    """The engine's side of drafting. Faults of the drafter cost its drafts, see `engine.drafters.guard`."""

    def __init__(
        self, drafter: AnyDrafter, config: EngineConfig, vocab_size: int, budget: TokenBudget | None = None
    ) -> None:
        """Without a `budget` all draft tokens are verified."""
        self._drafter = GuardedDrafter(adapt(drafter), vocab_size)
        self._has_trees = config.draft_shape == "tree"
        self._budget = budget
        self._started: set[int] = set()
        """Ids of the sequences that the drafter knows."""

    @property
    def drafter(self) -> GuardedDrafter:
        """The drafter in use."""
        return self._drafter

    def propose(self, plan: StepPlan) -> None:
        """Give drafts to the entries of a plan that produce."""
        for entry in plan.entries:
            if entry.sequence.sequence_id not in self._started:
                self._started.add(entry.sequence.sequence_id)
                self._drafter.start(entry.sequence)
        if not plan.producing or (self._budget is not None and self._budget.is_backing_off):
            return
        tokens = sum(entry.scheduled for entry in plan.entries)
        if self._budget is not None:
            plan.cost = self._budget.cost_of_one_more(tokens, len(plan.producing))
        began = perf_counter()
        drafts = self._drafter.propose(plan)
        plan.drafting_s = perf_counter() - began
        plan.asked = True
        lengths = np.diff(drafts.batch.offsets).astype(np.int64)
        if self._budget is not None:
            lengths, plan.is_probe = self._budget.select(drafts.batch, lengths, tokens)
        plan.q = drafts.q
        for index, (entry, length) in enumerate(zip(plan.producing, lengths.tolist(), strict=True)):
            if length:
                self._assign(entry, drafts, index, length)

    def observe(self, result: StepResult) -> None:
        """Report a step whose tokens are committed."""
        self._drafter.observe(result)

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """End a sequence; its drafter may learn what it produced."""
        if sequence.sequence_id in self._started:
            self._started.remove(sequence.sequence_id)
            self._drafter.finish(sequence, learn)

    def close(self) -> None:
        """Release the drafter."""
        self._drafter.close()

    def _assign(self, entry: SequencePlan, drafts: Drafts, index: int, length: int) -> None:
        """Give an entry the first `length` tokens of its draft; of a tree, only a path where trees are off."""
        batch = drafts.batch
        start = int(batch.offsets[index])
        parents = batch.parents[start : start + length]
        straight = straight_length(parents)
        if straight < length:
            if self._has_trees:
                entry.tree = DraftTree(parents)
            else:
                length = straight
        entry.draft = batch.tokens[start : start + length]
        entry.sources = batch.source[start : start + length]
        if drafts.q_rows is not None:
            entry.q_rows = drafts.q_rows[start : start + length]
