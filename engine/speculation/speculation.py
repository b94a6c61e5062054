"""Add drafts to a step: call the drafter and select the draft tokens that are worth verifying.

In rejection mode, outputs follow the target's distribution only if the decision to verify a sampled token does not
depend on that token. The token budget therefore does not get the drafter's `accept_prob` of such tokens, but a path
whose probabilities are the acceptance rates by depth of earlier steps. It selects a depth; the draft, which is also a
path, is verified up to that depth.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import numpy as np

from engine.config import EngineConfig
from engine.drafters.base import Drafter
from engine.drafters.drafts import Drafts
from engine.drafters.guard import GuardedDrafter
from engine.scheduling.plan import StepPlan
from engine.scheduling.result import StepResult
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import HAS_GRAMMAR, KIND, MAX_DRAFT
from engine.speculation.draft_tree import straight_lengths
from engine.speculation.grammar_drafts import follow_grammars
from engine.speculation.selection import DeviceDrafting, DraftSelection
from engine.speculation.verify import uses_rejection
from ssd.types import DraftBatch, Path

DECAY = 0.99
"""Decay per recorded draft of the counts: an effective window of about 100 drafts."""
PRIOR_RATE = 0.7
"""Prior of the rates, with the weight of one draft."""


class Speculation:
    """Calls the drafter for each step, and selects which draft tokens are verified."""

    def __init__(
        self,
        drafter: Drafter,
        config: EngineConfig,
        vocab_size: int,
        selection: DraftSelection | None = None,
        device_drafting: DeviceDrafting | None = None,
    ) -> None:
        """Without a `selection` all draft tokens are verified. Without `device_drafting` the device drafts in every
        step with a request that wants drafts.
        """
        self._drafter = GuardedDrafter(drafter, vocab_size)
        self.may_draft = drafter.limits.depth > 0
        """Whether the drafter ever drafts."""
        self._has_trees = config.draft_shape == "tree"
        self._selection = selection
        self._device_drafting = device_drafting
        self._rates = DepthRates(config.max_draft)

    @property
    def drafter(self) -> GuardedDrafter:
        """The drafter in use."""
        return self._drafter

    def start(self, sequences: Iterable[Sequence]) -> None:
        """Let the drafter start the sequences that it has not started yet."""
        for sequence in sequences:
            self._drafter.start(sequence)

    def prepare(self, plan: StepPlan) -> bool:
        """Set the plan's price. Return whether the drafter is called in this step."""
        plan.drafts, plan.lengths = Drafts.empty(plan.producers), np.zeros(plan.producers, np.int64)
        if not self.may_draft or not plan.rooms.any():
            return False
        if self._selection is None:
            return True
        plan.is_backing_off = not self._selection.admits(plan)
        if not plan.is_backing_off:
            plan.price = self._selection.price(plan)
        return not plan.is_backing_off

    def propose(self, plan: StepPlan) -> None:
        """Set the drafts of a plan, and how much of each is verified."""
        is_drafting = self.prepare(plan)
        has_grammars = plan.has(HAS_GRAMMAR) and bool(plan.rooms.any())
        if not is_drafting and not has_grammars:
            return
        if is_drafting:
            began = perf_counter()
            plan.drafts = self._drafter.propose(plan)
            plan.drafting_s = perf_counter() - began
            plan.is_drafting = True
            plan.extra_rows = 0 if plan.drafts.extra is None else len(plan.drafts.extra.tokens)
        if has_grammars:
            self._follow_grammars(plan)
        plan.lengths = self._usable_lengths(plan.drafts.batch)
        if self._selection is None:
            return
        shown = plan.drafts.batch
        if plan.drafts.q_rows is not None and (is_sampled := uses_rejection(plan)).any():
            shown = hide_sampled(plan.drafts, is_sampled, plan.rooms, self._rates)
        lengths = self._selection.select(plan, shown, self._usable_lengths(shown))
        plan.lengths = np.minimum(lengths, plan.lengths)

    def _follow_grammars(self, plan: StepPlan) -> None:
        """Let drafts follow the grammars of their requests."""
        has_grammar = plan.table.state[plan.rows, KIND] & HAS_GRAMMAR != 0
        plan.constrained = at = np.flatnonzero(has_grammar & (plan.rooms > 0))
        if len(at):
            plan.proposed = plan.drafts.take(at)
            sequences = plan.table.of(plan.rows[at])
            plan.drafts = plan.drafts.replaced(at, follow_grammars(plan.proposed, sequences, plan.rooms[at]))

    def leave_to_device(self, plan: StepPlan) -> None:
        """Decide whether the device drafts in a step."""
        plan.drafts_on_device = True
        if plan.table.state[plan.all_rows, MAX_DRAFT].any():
            plan.is_backing_off = self._device_drafting is not None and self._device_drafting.is_backing_off
            plan.is_drafting = not plan.is_backing_off

    def observe(self, result: StepResult) -> None:
        """Pass the results of a step to the drafter, once its tokens are committed."""
        plan = result.plan
        if plan.drafts.q_rows is not None:
            for index in np.flatnonzero(uses_rejection(plan) & (result.lengths > 0)).tolist():
                self._rates.record(int(result.depths[index]), int(result.accepted[index]))
        if plan.drafts_on_device or not self.may_draft:
            return
        if len(plan.constrained) and not self._drafter.needs.top_k:
            # As if the step had verified the drafter's own drafts, not those that were made from them by grammars.
            result = result.with_drafts(plan.drafts.replaced(plan.constrained, plan.proposed), plan.constrained)
        self._drafter.observe(result)

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """End a sequence. `learn`: whether the drafter may remember its output."""
        self._drafter.finish(sequence, learn)

    def close(self) -> None:
        """Release the drafter."""
        self._drafter.close()

    def _usable_lengths(self, batch: DraftBatch) -> np.ndarray:
        """Return the number of verifiable tokens of each draft, int64 [B]; without tree drafts, those before a
        branch."""
        if self._has_trees:
            return np.diff(batch.offsets.astype(np.int64))
        return straight_lengths(batch.parents, batch.offsets)


class DepthRates:
    """Fraction of accepted draft tokens by depth, given that the parent was accepted."""

    def __init__(self, max_draft: int) -> None:
        self._tried = np.ones(max_draft)
        self._accepted = np.full(max_draft, PRIOR_RATE)
        self.deepest = 0
        """Largest depth of earlier drafts."""

    def path(self, length: int) -> DraftBatch:
        """Return a draft with these rates as `accept_prob`; the tokens are placeholders.

        It has at most `length` tokens, and no more than the deepest of earlier drafts, because the length of the
        present draft may depend on the tokens that were sampled.
        """
        length = min(length, self.deepest)
        rates = (self._accepted / self._tried)[:length]
        return DraftBatch.from_paths([Path(np.zeros(length, np.uint32), rates.astype(np.float32))])

    def record(self, verified: int, accepted: int) -> None:
        """Count the tokens of a draft by depth: those that could have been accepted, and those that were."""
        depth = np.arange(1, len(self._tried) + 1)
        reached = depth <= min(verified, accepted + 1)
        self._tried = DECAY * self._tried + (1 - DECAY) + reached
        self._accepted = DECAY * self._accepted + (1 - DECAY) * PRIOR_RATE + (reached & (depth <= accepted))


def hide_sampled(drafts: Drafts, is_sampled: np.ndarray, rooms: np.ndarray, rates: DepthRates) -> DraftBatch:
    """Return the drafts for the token budget, with sampled ones, bool [B], replaced by paths of acceptance rates.

    rooms: int64 [B], largest number of tokens of each draft.
    """
    batch = drafts.batch
    parts = [rates.path(room) if hidden else batch.take([at]) for at, (hidden, room) in enumerate(
        zip(is_sampled.tolist(), rooms.tolist(), strict=True)
    )]  # fmt: skip
    rates.deepest = max(rates.deepest, int(drafts.sizes[is_sampled].max(initial=0)))
    return DraftBatch.concatenate(parts)
