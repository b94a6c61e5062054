"""Add drafts to a step: call the drafter and select the draft tokens that are worth verifying."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from engine.config import EngineConfig
from engine.drafters.base import Drafts, ExtraRows
from engine.drafters.guard import GuardedDrafter
from engine.drafters.tokens import TokenDrafter, adapt, limits_of
from engine.scheduling.commit import VERIFIED
from engine.scheduling.plan import SequencePlan, SequenceResult, StepPlan, StepResult
from engine.scheduling.row_results import RowResults
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import HAS_GRAMMAR, KIND
from engine.speculation.device_drafting import DeviceDrafting
from engine.speculation.draft_tree import DraftTree, straight_length, straight_lengths
from engine.speculation.grammar_drafts import follow_grammars, has_grammar_drafts
from engine.speculation.sampled_drafts import DepthRates, hide_sampled, sampled_drafts
from engine.speculation.selection import DraftSelection
from engine.speculation.verify import uses_rejection
from ssd.types import ROOT, DraftBatch

if TYPE_CHECKING:
    from engine.drafters.kinds import AnyDrafter


class Speculation:
    """Calls the drafter for each step, and selects which draft tokens are verified."""

    def __init__(
        self,
        drafter: AnyDrafter,
        config: EngineConfig,
        vocab_size: int,
        selection: DraftSelection | None = None,
        device_drafting: DeviceDrafting | None = None,
    ) -> None:
        """Without a `selection` all draft tokens are verified. Without `device_drafting` the device drafts in every
        step with a request that wants drafts.
        """
        self._drafter = GuardedDrafter(adapt(drafter), vocab_size)
        self.may_draft = limits_of(self._drafter.inner).depth > 0
        """Whether the drafter ever drafts."""
        self._drafts_tokens = isinstance(self._drafter.inner, TokenDrafter)
        self._has_trees = config.draft_shape == "tree"
        self._selection = selection
        self._device_drafting = device_drafting
        self._rates = DepthRates(config.max_draft)
        self._started: set[int] = set()
        """Ids of the sequences that the drafter has started."""

    @property
    def drafter(self) -> GuardedDrafter:
        """The drafter in use."""
        return self._drafter

    def start(self, sequences: Iterable[Sequence]) -> None:
        """Let the drafter start the sequences that it has not started yet."""
        for sequence in sequences:
            if sequence.sequence_id not in self._started:
                self._started.add(sequence.sequence_id)
                self._drafter.start(sequence)

    def prepare(self, plan: StepPlan) -> bool:
        """Set the plan's price. Return whether the drafter is called in this step."""
        plan.lengths = np.zeros(plan.producers, np.int64)
        if not self.may_draft or not plan.rooms.any():
            return False
        if self._selection is None:
            return True
        plan.is_backing_off = not self._selection.admits(plan)
        if not plan.is_backing_off:
            plan.price = self._selection.price(plan)
        return not plan.is_backing_off

    def propose(self, plan: StepPlan, *, by_rows: bool) -> None:
        """Set the drafts of a plan. by_rows: as arrays, if a drafter of tokens makes them; otherwise in its entries."""
        is_drafting = self.prepare(plan)
        has_grammars = plan.has(HAS_GRAMMAR) and bool(plan.rooms.any())
        if not is_drafting and not has_grammars:
            return
        if not self._drafts_tokens or (has_grammars and not by_rows):
            self._propose_entries(plan, is_drafting=is_drafting)
            return
        drafts = DraftBatch.empty(plan.producers)
        if is_drafting:
            began = perf_counter()
            drafts = self._drafter.draft(plan)
            plan.drafting_s = perf_counter() - began
            plan.is_drafting = True
        if has_grammars:
            drafts = self._follow_grammars(plan, drafts)
        plan.drafts, plan.lengths = drafts, self._usable_lengths(drafts)
        if self._selection is not None:
            plan.lengths = self._selection.select(plan, drafts, plan.lengths)

    def _follow_grammars(self, plan: StepPlan, drafts: DraftBatch) -> DraftBatch:
        """Return drafts that follow the grammars of their requests; others are as before."""
        assert plan.table is not None
        at = np.flatnonzero((plan.table.state[plan.rows, KIND] & HAS_GRAMMAR) & (plan.rooms > 0))
        if not len(at):
            return drafts
        for index, sequence in zip(at.tolist(), plan.table.of(plan.rows[at]), strict=True):
            plan.own_entries[index] = SequencePlan(sequence, 0, 1, produces=True, draft_room=int(plan.rooms[index]))
        own = follow_grammars(Drafts(drafts.take(at)), [plan.own_entries[index] for index in at.tolist()]).batch
        order = np.arange(plan.producers)
        order[at] = plan.producers + np.arange(len(at))
        return DraftBatch.concatenate([drafts, own]).take(order)

    def _propose_entries(self, plan: StepPlan, *, is_drafting: bool) -> None:
        """Set the drafts of the producing entries of a plan."""
        drafts, plan.lengths = Drafts.empty(plan.producers), None
        if is_drafting:
            began = perf_counter()
            drafts = self._draft(plan)
            plan.drafting_s = perf_counter() - began
            plan.is_drafting = True
        if has_grammar_drafts(plan.producing):
            drafts = follow_grammars(drafts, plan.producing)
        if drafts.extra is not None:
            add_extra_rows(plan, drafts.extra)
        sampled = sampled_drafts(drafts, plan.producing)
        shown = drafts.batch
        if self._selection is not None and any(sampled):
            shown = hide_sampled(shown, sampled, plan.producing, self._rates)
        lengths = self._usable_lengths(shown)
        if self._selection is not None:
            lengths = self._selection.select(plan, shown, lengths)
        plan.q = drafts.q
        for index, (entry, length) in enumerate(zip(plan.producing, lengths.tolist(), strict=True)):
            self._assign(entry, drafts, index, length, by_depth=sampled[index] and self._selection is not None)

    def assign(self, plan: StepPlan) -> None:
        """Write the drafts of a plan into its entries."""
        if plan.drafts is None or plan.lengths is None:
            return
        drafts = Drafts(plan.drafts)
        for index, (entry, length) in enumerate(zip(plan.producing, plan.lengths.tolist(), strict=True)):
            self._assign(entry, drafts, index, length, by_depth=False)

    def leave_to_device(self, plan: StepPlan) -> None:
        """Decide whether the device drafts in a step."""
        plan.drafts_on_device = True
        if any(entry.sequence.request.is_drafted for entry in plan.entries):
            plan.is_backing_off = self._device_drafting is not None and self._device_drafting.is_backing_off
            plan.is_drafting = not plan.is_backing_off

    @property
    def observes_rows(self) -> bool:
        """Whether `observe_rows` replaces `observe`."""
        return self._drafts_tokens or not self.may_draft

    def observe_rows(self, plan: StepPlan, results: RowResults) -> None:
        """Note a step that produced tokens of sequences, see `TokenDrafter.note_step`."""
        if not self.may_draft:
            return
        verified = results.values[:, VERIFIED].astype(np.int64)
        for index, result in results.chosen.items():
            if uses_rejection(result.plan):
                self._rates.record(result)
            verified[index] = _own_result(result).drafted
        self._drafter.note_step(plan.rows, results.kept, verified)

    def observe(self, result: StepResult) -> None:
        """Pass the results of a step to the drafter, once its tokens are committed."""
        for each in result.results:
            if uses_rejection(each.plan):
                self._rates.record(each)
        if not result.plan.drafts_on_device and self.may_draft:
            if not self._drafter.needs.top_k:
                result = replace(result, results=[_own_result(each) for each in result.results])
            self._drafter.observe(result)

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """End a sequence. `learn`: whether the drafter may remember its output."""
        if sequence.sequence_id in self._started:
            self._started.remove(sequence.sequence_id)
            self._drafter.finish(sequence, learn)

    def close(self) -> None:
        """Release the drafter."""
        self._drafter.close()

    def _draft(self, plan: StepPlan) -> Drafts:
        """Return the drafter's drafts for the producing entries; those of requests without drafts are empty."""
        part, at = drafted_part(plan)
        drafts = self._drafter.propose(part)
        return drafts if at is None else drafts.scatter(at, len(plan.producing))

    def _usable_lengths(self, batch: DraftBatch) -> np.ndarray:
        """Return the number of verifiable tokens of each draft, int64 [B]; without tree drafts, those before a
        branch."""
        if self._has_trees:
            return np.diff(batch.offsets.astype(np.int64))
        return straight_lengths(batch.parents, batch.offsets)

    def _assign(self, entry: SequencePlan, drafts: Drafts, index: int, length: int, *, by_depth: bool) -> None:
        """Set an entry's draft: its first `length` tokens, or all tokens of depth 1 to `length` if `by_depth`.

        Without tree drafts, the latter are cut at their first branch.
        """
        batch = drafts.batch
        start, end = int(batch.offsets[index]), int(batch.offsets[index + 1])
        own: slice | np.ndarray = slice(start, end if by_depth else start + length)
        parents = batch.parents[own]
        if by_depth:
            shallow = DraftTree(parents).depths <= length
            # Parents are less deep than their children, so they are kept as well.
            renumbered = np.append(np.cumsum(shallow) - 1, ROOT)
            own, parents = start + np.flatnonzero(shallow), renumbered[parents[shallow]].astype(np.int32)
        size = straight_length(parents)
        if size < len(parents) and self._has_trees:
            entry.tree = DraftTree(parents)
            size = len(parents)
        entry.draft = batch.tokens[own][:size]
        entry.max_verified = size
        entry.sources = batch.source[own][:size]
        if drafts.q_rows is not None:
            entry.q_rows = drafts.q_rows[own][:size]


def drafted_part(plan: StepPlan) -> tuple[StepPlan, np.ndarray | None]:
    """Return the plan for the drafter, and the indices of its producing entries in `plan.producing`, int64 [n].

    Producing entries of requests without drafts are left out. The indices are None if there are none of these.
    """
    at = [index for index, entry in enumerate(plan.producing) if entry.sequence.request.is_drafted]
    if len(at) == len(plan.producing):
        return plan, None
    entries = [entry for entry in plan.entries if not entry.produces or entry.sequence.request.is_drafted]
    return plan.part(entries), np.array(at)


def add_extra_rows(plan: StepPlan, extra: ExtraRows) -> None:
    """Set the extra rows of the producing entries of a plan."""
    plan.extra_rows = len(extra.tokens)
    for entry, (start, end) in zip(plan.producing, pairwise(extra.offsets.tolist()), strict=True):
        if start < end:
            entry.extra, entry.extra_tree = extra.tokens[start:end], DraftTree(extra.parents[start:end])


def _own_result(result: SequenceResult) -> SequenceResult:
    """Return a result as if the step had verified the drafter's own draft, not the one made from it by a grammar."""
    own = result.plan.proposed
    # Deeper tokens of the own draft were neither accepted nor rejected.
    return result if own is None else result.of_draft(own.until(len(result.tokens)))
