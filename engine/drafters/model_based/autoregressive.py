"""Drafters that run a network once per draft position: draft models, and MTP, EAGLE and EAGLE-3 heads.

One batched forward pass per draft position serves all sequences. The first pass of a draft also runs the tokens that
were committed since the previous one. Where trees are verified, the likeliest candidates of each depth are expanded
(EAGLE-2, Li et al., 2024); otherwise drafts are paths.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.drafters.base import DETERMINISTIC, DraftLayers, Drafts, TargetOutputs
from engine.drafters.calibration import Calibration
from engine.drafters.draft_forward import DraftForward, DraftSpan
from engine.drafters.draft_pool import Candidates, DraftPool, PoolDrafts, drafts_of, likeliest
from engine.drafters.model_based.slots import SlotWriter
from engine.executor.transfer import on_device
from engine.models.heads.head import DraftHead
from engine.sampling.draft_sampler import sample_drafts
from engine.scheduling.plan import SequencePlan, StepPlan, StepResult
from engine.scheduling.sequence import Sequence
from engine.speculation.draft_tree import DraftTree, straight_length
from ssd.types import ROOT

BRANCHES = 4
"""Number of candidates after each expanded node of a tree, and of nodes expanded at each depth."""
TIME_DECAY = 0.9
"""Decay per forward pass of its mean duration."""
RATE_DECAY = 0.99
"""Decay per step of the mean acceptance rate: an effective window of about 100 steps."""


class AutoregressiveDrafter:
    """Drafts with a head or a model that continues its own output."""

    def __init__(self, head: DraftHead, *, depth: int, has_trees: bool, source: int, is_coupled: bool = False) -> None:
        """depth: largest number of draft positions; fewer are drafted where a further forward pass does not pay.

        has_trees: whether drafts may have branches. source: code of the draft tokens, see `engine.drafters.sources`.
        is_coupled: whether paths are drafted without q even for requests in rejection mode, as trees always are.
        """
        self.head = head
        layers: tuple[DraftLayers, ...] = ()
        if not head.shares_target_cache:
            layers = (DraftLayers(replace(head.config, num_layers=head.num_layers), head.first_slot),)
        self.needs = TargetOutputs(hidden_layers=head.hidden_layers, layers=layers)
        self._depth = depth
        self._has_trees = has_trees
        self._is_coupled = is_coupled
        self._source = source
        self._calibration = Calibration()
        self._pace = Pace()

    def bind(self, forward: DraftForward) -> None:
        """Store access to the KV pages."""
        self._forward = forward
        self._writer = SlotWriter(self.head, forward)

    def start(self, sequence: Sequence) -> None:
        """See `Drafter.start`."""

    @torch.inference_mode()
    def observe(self, result: StepResult) -> None:
        """See `Drafter.observe`."""
        self._writer.observe(result.results)
        for each in result.results:
            self._pace.record_acceptance(*self._calibration.learn(each))

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """See `Drafter.finish`."""
        self._writer.finish(sequence)
        self._calibration.forget(sequence)

    def close(self) -> None:
        """See `Drafter.close`."""

    @torch.inference_mode()
    def propose(self, plan: StepPlan) -> Drafts:
        """See `Drafter.propose`."""
        entries = [entry for entry in plan.producing if self._can_draft(entry)]
        if not entries:
            return Drafts.empty(len(plan.producing))
        growth = self._grow(plan, entries)
        growth.keep_slots()
        drafts = growth.drafts(self._source)
        self._calibration.remember([entry.sequence for entry in entries], drafts)
        at = np.array([index for index, entry in enumerate(plan.producing) if entry in entries])
        batch = drafts.batch.scatter(at, len(plan.producing))
        if not growth.q:
            return Drafts(batch)
        return Drafts(batch, torch.cat(growth.q), drafts.nodes.q_row.astype(np.int32))

    def _can_draft(self, entry: SequencePlan) -> bool:
        """Whether the slots before the last token can be written: the target has computed all other tokens."""
        sequence = entry.sequence
        slots = self._writer.of(sequence)
        has_room = entry.draft_room > 0 and len(sequence) + self._depth <= self.head.config.max_positions
        return has_room and slots is not None and slots.computed == entry.computed == len(sequence) - 1

    def _grow(self, plan: StepPlan, entries: list[SequencePlan]) -> Growth:
        has_trees = self._has_trees and self._forward.runs_tree_parts
        growth = Growth(
            self.head,
            self._forward,
            self._writer,
            self._calibration,
            entries,
            branches=BRANCHES if has_trees else 1,
            is_coupled=self._is_coupled or has_trees,
        )
        began = perf_counter()
        growth.run_committed()
        for depth in range(1, self._depth + 1):
            growth.expand(depth)
            now = perf_counter()
            self._pace.record_forward(now - began, is_first=depth == 1)
            began = now
            nodes = growth.next_nodes()
            if depth == self._depth or not len(nodes.owner):
                break
            if plan.seconds is not None and not self._pace.is_worth_more(plan, growth.pool, nodes):
                break
            growth.run(nodes)
        return growth


class Growth:
    """Drafts of one step while they grow."""

    def __init__(
        self,
        head: DraftHead,
        forward: DraftForward,
        writer: SlotWriter,
        calibration: Calibration,
        entries: list[SequencePlan],
        *,
        branches: int,
        is_coupled: bool,
    ) -> None:
        """branches: largest number of candidates after a node, and of nodes expanded at each depth."""
        self.pool = DraftPool()
        self.q: list[Tensor] = []
        """Distributions that tokens were sampled from, float32 [rows, V] for each depth."""
        self._head, self._forward, self._writer, self._calibration = head, forward, writer, calibration
        self._entries = entries
        self._sequences = [entry.sequence for entry in entries]
        samplings = [sequence.request.sampling for sequence in self._sequences]
        self._is_sampled = np.array([sampling.is_sampled for sampling in samplings], np.bool_)
        self._branches, self._is_coupled = branches, is_coupled
        self._rooms = np.array([entry.draft_room for entry in entries])
        self._runs: list[list[int]] = [[] for _ in entries]
        """Nodes in the slots after the committed tokens of each sequence."""
        self._frontier = Frontier.empty()

    def run_committed(self) -> None:
        """Run the tokens that were committed since the last draft."""
        output, count = self._writer.run_committed(self._sequences), len(self._sequences)
        self._frontier = Frontier(np.arange(count), np.full(count, ROOT), np.ones(count), output.state, output.hidden)

    def expand(self, depth: int) -> None:
        """Add candidates after each node of the frontier."""
        owner, node, path_prob, _, hidden = self._frontier
        logits = target_logits(self._head, hidden)
        sequences = [self._sequences[index] for index in owner.tolist()]
        if any(sequence.request.sampling.adjusts for sequence in sequences):
            paths = [self.pool.path_to(each) for each in node.tolist()]
        else:
            paths = [np.empty(depth - 1, np.uint32)] * len(sequences)  # Only their lengths matter.
        sampled = sample_drafts(sequences, paths, logits, self._branches, is_coupled=self._is_coupled)
        exists = sampled.is_possible.cpu().numpy()
        row, _ = np.nonzero(exists)
        score = sampled.scores.cpu().numpy()[exists]
        accept_prob = self._calibration.accept_prob(self._is_sampled[owner[row]], score, depth)
        q_row = np.full(len(row), DETERMINISTIC)
        if sampled.q is not None:
            first = sum(map(len, self.q))
            q_row = np.where(sampled.has_q[row], first + row, DETERMINISTIC)
            self.q.append(sampled.q)
        self._newest = Candidates(
            owner[row],
            node[row],
            sampled.tokens.cpu().numpy()[exists],
            np.full(len(row), depth),
            accept_prob,
            path_prob[row] * accept_prob,
            score,
            q_row,
        )
        self._newest_rows = row
        self._newest_first = len(self.pool)
        self.pool.add(self._newest)

    def next_nodes(self) -> Candidates:
        """Return the newest candidates to expand, and make them the frontier without their states."""
        left = self._rooms - 1 - np.array([len(run) for run in self._runs])
        chosen = likeliest(self._newest.owner, self._newest.path_prob, np.minimum(self._branches, left))
        self._chosen = chosen
        return self._newest.take(chosen)

    def run(self, nodes: Candidates) -> None:
        """Run the nodes that `next_nodes` returned."""
        ids = self._newest_first + self._chosen
        spans = []
        for owner in np.unique(nodes.owner).tolist():
            spans.append(self._span(owner, ids[nodes.owner == owner].tolist()))
        begin = self._forward.begin_on_target if self._head.shares_target_cache else self._forward.begin
        rows = begin(spans)
        device = self._forward.device
        states = self._frontier.states[on_device(self._newest_rows[self._chosen], device)]
        output = self._head(on_device(nodes.token, device), states, rows.positions, rows.attend, self._forward.ops)
        self._frontier = Frontier(nodes.owner, ids, nodes.path_prob, output.state, output.hidden)

    def drafts(self, source: int) -> PoolDrafts:
        """Return the likeliest candidates."""
        return drafts_of(self.pool, self._rooms, source)

    def keep_slots(self) -> None:
        """Record the path of draft tokens whose slots stay valid if they are committed."""
        if self._head.state_size or self._head.shares_target_cache:
            return  # The target's states replace those of the draft.
        nodes = self.pool.all()
        for sequence, run in zip(self._sequences, self._runs, strict=True):
            places = {node: place for place, node in enumerate(run)}
            parents = np.array([places.get(int(nodes.parent[node]), ROOT) for node in run], np.int32)
            slots = self._writer.of(sequence)
            assert slots is not None
            slots.drafted = nodes.token[run[: straight_length(parents)]].astype(np.uint32)

    def _span(self, owner: int, ids: list[int]) -> DraftSpan:
        """Return the span of nodes of a sequence, which are added to its slots."""
        run = self._runs[owner]
        run += ids
        entry = self._entries[owner]
        start = len(entry.sequence) + len(run) - len(ids)
        if self._branches == 1:
            return DraftSpan(entry.sequence.pages, start, len(ids))
        places = {node: place for place, node in enumerate(run)}
        parents = [places.get(self.pool.parent(node), ROOT) for node in run]
        return DraftSpan(entry.sequence.pages, start, len(ids), DraftTree(np.array(parents, np.int32)))


class Frontier(NamedTuple):
    """The n nodes whose outputs are known and that have no candidates yet."""

    owner: np.ndarray
    """int64 [n]: index of the sequence, ascending."""
    node: np.ndarray
    """int64 [n]: index in the pool, `ROOT` for the last committed token."""
    path_prob: np.ndarray
    """float [n]."""
    states: Tensor
    """[n, S]: the head's state after each node."""
    hidden: Tensor
    """[n, hidden size]: input of the output projection."""

    @classmethod
    def empty(cls) -> Frontier:
        """Return a frontier without nodes."""
        nothing, no_rows = np.empty(0, np.int64), torch.empty(0, 0)
        return cls(nothing, nothing, nothing, no_rows, no_rows)


class Pace:
    """Durations of forward passes and acceptance, from which the depth of drafts is chosen."""

    def __init__(self) -> None:
        self._next_s = 0.0
        """Mean duration of a pass after the first."""
        self._spent_s = 0.0
        """Duration of the passes of the current draft."""
        self._tried = self._accepted = 1.0

    def record_forward(self, seconds: float, *, is_first: bool) -> None:
        """Record the duration of one pass."""
        self._spent_s = seconds if is_first else self._spent_s + seconds
        if not is_first:
            self._next_s = TIME_DECAY * self._next_s + (1 - TIME_DECAY) * seconds if self._next_s else seconds

    def record_acceptance(self, depths: np.ndarray, accepted: np.ndarray) -> None:
        """Record which tokens were accepted, given that their parents were."""
        reached = len(np.unique(depths))
        self._tried = RATE_DECAY * self._tried + reached
        self._accepted = RATE_DECAY * self._accepted + np.count_nonzero(accepted)

    def is_worth_more(self, plan: StepPlan, pool: DraftPool, nodes: Candidates) -> bool:
        """Whether expanding `nodes` increases the expected number of tokens per second."""
        assert plan.seconds is not None
        gain = float(nodes.path_prob.sum()) * self._accepted / self._tried
        so_far = len(plan.producing) + float(pool.all().path_prob.sum())
        token_s = (plan.cost or 0.0) * plan.seconds
        next_s = (self._next_s or self._spent_s) + len(nodes.owner) * token_s
        spent_s = plan.seconds + self._spent_s + len(pool) * token_s
        return gain / next_s > so_far / spent_s


def target_logits(head: DraftHead, hidden: Tensor) -> Tensor:
    """Return logits over the target's vocabulary, float32 [n, V], -inf outside of the draft vocabulary."""
    logits = head.logits(hidden).float()
    if head.draft_vocabulary is None:
        return logits
    whole = logits.new_full((len(logits), head.target.config.vocab_size), float("-inf"))
    return whole.index_copy_(1, head.draft_vocabulary, logits)
