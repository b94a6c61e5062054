"""Medusa: heads on the target's last state predict one of the next tokens each, independently of each other.

Cai et al., "Medusa" (2024). The candidates of a depth are the same after every path, so a draft needs a single forward
pass. Where trees are verified, the likeliest combinations form a tree; otherwise drafts are paths.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from engine.drafters.base import Drafter, TargetOutputs
from engine.drafters.draft_pool import DraftPool
from engine.drafters.drafts import Drafts
from engine.models.heads.medusa import MedusaHeads
from engine.sampling.draft_sampler import DraftSampler
from engine.scheduling.plan import StepPlan
from engine.scheduling.result import StepResult
from engine.scheduling.sequence import Sequence
from ssd.acceptance import AcceptanceTable
from ssd.types import ROOT

BRANCHES = 8
"""Number of candidates at each depth of a tree."""


class MedusaDrafter(Drafter):
    """Drafts with Medusa heads."""

    def __init__(
        self, heads: MedusaHeads, *, depth: int, has_trees: bool, source: int, is_coupled: bool = False
    ) -> None:
        """depth: largest number of heads to use; for the others see `AutoregressiveDrafter`."""
        self.heads = heads
        self.needs = TargetOutputs(hidden_layers=heads.hidden_layers)
        self._depth = min(depth, len(heads.heads))
        self._branches = BRANCHES if has_trees else 1
        self._is_coupled = is_coupled or has_trees
        self._source = source
        self._states: dict[int, Tensor] = {}
        """The target's state of the position before the last committed token, [1, hidden size], by sequence id."""
        self._table = AcceptanceTable()

    @torch.inference_mode()
    def observe(self, result: StepResult) -> None:
        """See `Drafter.observe`."""
        result.teach(self._table)
        for index in np.flatnonzero(result.lengths).tolist():
            sequence, hidden = result.plan.producing[index], result.hidden_of(index)
            row = len(sequence) - 2 - int(result.plan.computed[index])
            self._states[sequence.sequence_id] = hidden[row : row + 1]

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """See `Drafter.finish`."""
        self._states.pop(sequence.sequence_id, None)

    @torch.inference_mode()
    def propose(self, plan: StepPlan) -> Drafts:
        """See `Drafter.propose`."""
        at = np.flatnonzero([self._can_draft(plan, index) for index in range(plan.producers)])
        if not len(at):
            return Drafts.empty(plan.producers)
        part = plan.take(at)
        states = torch.cat([self._states[sequence.sequence_id] for sequence in part.producing])
        logits = self.heads(self.heads.target_states(states)).float()
        return self._grow(part.producing, logits).drafts(part.rooms, self._source).scatter(at, plan.producers)

    def _can_draft(self, plan: StepPlan, index: int) -> bool:
        # After a preemption the last state is that of an earlier position, until the sequence was recomputed.
        sequence = plan.producing[index]
        is_computed = plan.computed[index] == len(sequence) - 1
        return plan.rooms[index] > 0 and is_computed and sequence.sequence_id in self._states

    def _grow(self, sequences: SequenceOf[Sequence], logits: Tensor) -> DraftPool:
        """Return candidates of all depths. logits: float32 [B, heads, V]."""
        sampler = DraftSampler(sequences, is_coupled=self._is_coupled)
        every, limits = np.arange(len(sequences)), np.full(len(sequences), self._branches)
        pool = DraftPool()
        # The frontier: nodes that are continued at the next depth.
        owner, node = every, np.full(len(sequences), ROOT)
        for depth in range(1, self._depth + 1):
            paths = _likeliest_paths(pool, owner, node, len(sequences)) if sampler.adjusts else None
            sampled = sampler.sample(logits[:, depth - 1].contiguous(), every, depth - 1, self._branches, paths)
            is_sampled = sampler.is_sampled[owner]
            first = pool.add_sampled(owner, node, sampled, self._table, is_sampled, depth, rows=owner)
            node = pool.likeliest(first, limits)
            owner = pool.nodes.owner[node]
        return pool


def _likeliest_paths(pool: DraftPool, owner: np.ndarray, node: np.ndarray, count: int) -> list[np.ndarray]:
    """Return the path to the likeliest node of each of `count` sequences, uint32, empty without nodes.

    Penalties depend on the path; those after the likeliest one are used for all nodes of a depth. owner, node: int64
    [n], the nodes in the order of `likeliest`.
    """
    paths = [np.empty(0, np.uint32)] * count
    for own, first in zip(*np.unique(owner, return_index=True), strict=True):
        paths[own] = pool.path_to(int(node[first]))
    return paths
