"""Medusa: heads on the target's last state predict one of the next tokens each, independently of each other.

Cai et al., "Medusa" (2024). The candidates of a depth are the same after every path, so a draft needs a single forward
pass. Where trees are verified, the likeliest combinations form a tree; otherwise drafts are paths.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.drafters.base import DETERMINISTIC, Drafts, TargetOutputs
from engine.drafters.calibration import Calibration
from engine.drafters.draft_pool import Candidates, DraftPool, drafts_of, likeliest
from engine.models.heads.medusa import MedusaHeads
from engine.sampling.draft_sampler import SampledTokens, sample_drafts
from engine.scheduling.plan import SequencePlan, StepPlan, StepResult
from engine.scheduling.sequence import Sequence
from ssd.types import ROOT

BRANCHES = 8
"""Number of candidates at each depth of a tree."""


class MedusaDrafter:
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
        self._calibration = Calibration()

    def start(self, sequence: Sequence) -> None:
        """See `Drafter.start`."""

    @torch.inference_mode()
    def observe(self, result: StepResult) -> None:
        """See `Drafter.observe`."""
        for each in result.results:
            self._calibration.learn(each)
            if each.plan.produces and each.hidden is not None:
                row = len(each.plan.sequence) - 2 - each.plan.computed
                self._states[each.sequence_id] = each.hidden[row : row + 1]

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """See `Drafter.finish`."""
        self._states.pop(sequence.sequence_id, None)
        self._calibration.forget(sequence)

    def close(self) -> None:
        """See `Drafter.close`."""

    @torch.inference_mode()
    def propose(self, plan: StepPlan) -> Drafts:
        """See `Drafter.propose`."""
        entries = [entry for entry in plan.producing if self._can_draft(entry)]
        if not entries:
            return Drafts.empty(len(plan.producing))
        sequences = [entry.sequence for entry in entries]
        states = torch.cat([self._states[sequence.sequence_id] for sequence in sequences])
        logits = self.heads(self.heads.target_states(states)).float()
        pool, q = self._grow(sequences, logits)
        rooms = np.array([entry.draft_room for entry in entries])
        drafts = drafts_of(pool, rooms, self._source)
        self._calibration.remember(sequences, drafts)
        at = np.array([index for index, entry in enumerate(plan.producing) if entry in entries])
        batch = drafts.batch.scatter(at, len(plan.producing))
        return Drafts(batch, torch.cat(q), drafts.nodes.q_row.astype(np.int32)) if q else Drafts(batch)

    def _can_draft(self, entry: SequencePlan) -> bool:
        # After a preemption the last state is that of an earlier position, until the sequence was recomputed.
        is_computed = entry.computed == len(entry.sequence) - 1
        return entry.draft_room > 0 and is_computed and entry.sequence.sequence_id in self._states

    def _grow(self, sequences: list[Sequence], logits: Tensor) -> tuple[DraftPool, list[Tensor]]:
        """Return candidates of all depths, and the distributions that they were sampled from.

        logits: float32 [B, heads, V].
        """
        samplings = [sequence.request.sampling for sequence in sequences]
        is_sampled = np.array([sampling.is_sampled for sampling in samplings], np.bool_)
        limits = np.full(len(sequences), self._branches)
        pool, q = DraftPool(), list[Tensor]()
        # The frontier: nodes that are continued at the next depth.
        owner, node, path_prob = np.arange(len(sequences)), np.full(len(sequences), ROOT), np.ones(len(sequences))
        for depth in range(1, self._depth + 1):
            first_of_owner = np.searchsorted(owner, np.arange(len(sequences)))
            has_nodes = np.isin(np.arange(len(sequences)), owner)
            # Penalties depend on the path; those after the likeliest path are used for all nodes of a depth.
            paths = [
                pool.path_to(int(node[first])) if has else np.zeros(depth - 1, np.uint32)
                for first, has in zip(first_of_owner.tolist(), has_nodes.tolist(), strict=True)
            ]
            sampled = sample_drafts(sequences, paths, logits[:, depth - 1], self._branches, is_coupled=self._is_coupled)
            q_first = sum(map(len, q))
            if sampled.q is not None:
                q.append(sampled.q)
            newest = self._children(sampled, owner, node, path_prob, depth, is_sampled, q_first)
            first = len(pool)
            pool.add(newest)
            chosen = likeliest(newest.owner, newest.path_prob, limits)
            owner, node, path_prob = newest.owner[chosen], first + chosen, newest.path_prob[chosen]
        return pool, q

    def _children(
        self,
        sampled: SampledTokens,
        owner: np.ndarray,
        node: np.ndarray,
        path_prob: np.ndarray,
        depth: int,
        is_sampled: np.ndarray,
        q_first: int,
    ) -> Candidates:
        """Return the candidates after each node of the frontier."""
        row, column = np.nonzero(sampled.is_possible.cpu().numpy()[owner])
        whose = owner[row]
        score = sampled.scores.cpu().numpy()[whose, column]
        accept_prob = self._calibration.accept_prob(is_sampled[whose], score, depth)
        return Candidates(
            owner=whose,
            parent=node[row],
            token=sampled.tokens.cpu().numpy()[whose, column],
            depth=np.full(len(row), depth),
            accept_prob=accept_prob,
            path_prob=path_prob[row] * accept_prob,
            score=score,
            q_row=np.where(sampled.has_q[whose], q_first + whose, DETERMINISTIC),
        )
