"""Drafters that run a network once per draft position: draft models, and MTP, EAGLE and EAGLE-3 heads.

One batched forward pass per draft position serves all sequences. The first pass of a draft also runs the tokens that
were committed since the previous one. Where trees are verified, the likeliest candidates of each depth are expanded
(EAGLE-2, Li et al., 2024); otherwise drafts are paths.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.plain import PlainAttention
from engine.config import EngineConfig
from engine.drafters.base import Drafter, DraftLayers, TargetOutputs
from engine.drafters.compiled.layers import Network
from engine.drafters.compiled.network import MAX_WEIGHTS, can_sample, compile_head
from engine.drafters.device_chain import DeviceChain
from engine.drafters.draft_forward import DraftForward, DraftSpan
from engine.drafters.draft_pool import DraftPool
from engine.drafters.drafts import Drafts
from engine.drafters.pricing import DraftDepth
from engine.drafters.slots import SlotWriter
from engine.executor.transfer import on_device
from engine.models.heads.head import DraftHead
from engine.sampling.draft_sampler import DraftSampler
from engine.scheduling.plan import StepPlan
from engine.scheduling.result import StepResult
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import COMPUTED, rows_for
from engine.speculation.draft_tree import DraftTree, straight_length
from ssd.acceptance import AcceptanceTable
from ssd.types import ROOT, DraftLimits

if TYPE_CHECKING:
    from engine.drafters.compiled.drafting import CompiledDrafting

SLOW_COPY = (
    "a copy of the target pays only as a compiled network, which drafts paths, in float32 on a CPU, with at most "
    f"{MAX_WEIGHTS >> 20} M weights"
)
"""Why `self-int8` without a compiled network cannot pay."""
BRANCHES = 4
"""Number of candidates after each expanded node of a tree, and of nodes expanded at each depth."""


class AutoregressiveDrafter(Drafter):
    """Drafts with a head or a model that continues its own output."""

    def __init__(
        self,
        head: DraftHead,
        *,
        depth: int,
        has_trees: bool,
        source: int,
        is_coupled: bool = False,
        network: Network | None = None,
    ) -> None:
        """depth: largest number of draft positions; fewer are drafted where a further forward pass is not worthwhile.

        has_trees: whether drafts may have branches. source: code of the draft tokens, see `engine.drafters.sources`.
        is_coupled: whether paths are drafted without q even for requests in rejection mode, as trees always are.
        network: computes what the head does, for paths whose sampling it supports.
        """
        self.head = head
        self._network = network
        self._compiled: CompiledDrafting | None = None
        layers: tuple[DraftLayers, ...] = ()
        if not head.shares_target_cache:
            shape = replace(head.config, num_layers=head.num_layers)
            layers = (DraftLayers(shape, head.first_slot, head.state_size),)
        self.needs = TargetOutputs(hidden_layers=head.hidden_layers, layers=layers)
        self.limits = DraftLimits(depth)
        self.copies = head.copies
        self._depth = depth
        self._has_trees = has_trees
        self._is_coupled = is_coupled
        self._source = source
        self._table = AcceptanceTable()
        self._draft_depth = DraftDepth()
        self._has_drafted = False
        """Whether it has drafted since the last result."""

    def bind(self, forward: DraftForward) -> None:
        """Store access to the KV pages."""
        self._forward = forward
        attention = forward.target if self.head.shares_target_cache else forward.own
        if self._network is not None and isinstance(attention, PlainAttention):
            # Its kernels are compiled when it is first imported.
            from engine.drafters.compiled.drafting import CompiledDrafting, cache_of

            self._compiled = CompiledDrafting(self._network, cache_of(attention))
        self._writer = SlotWriter(self.head, forward, self._compiled)
        if self._compiled is None and self.head.shares_target_cache:
            # PyTorch runs a copy of the target no faster than the target.
            self.limits = DraftLimits(self._depth, position_steps=1.0, cause=SLOW_COPY)

    def weights_changed(self) -> None:
        """Convert the weights that the compiled network shares with the target again."""
        if self._compiled is not None:
            network = compile_head(self.head)
            assert network is not None
            self._compiled.network = network

    def device_chain(self, config: EngineConfig) -> DeviceChain | None:
        """See `Drafter`; None for trees, and for a head that has no layers of its own."""
        depth = min(self._depth, config.max_draft)
        if self._has_trees or self.head.shares_target_cache or not depth:
            return None
        return DeviceChain(self.head, self._forward, self._writer, depth, rows_for(config.max_sequences), self._source)

    @torch.inference_mode()
    def observe(self, result: StepResult) -> None:
        """See `Drafter.observe`."""
        # Where a head shares the target's slots, a sequence may have ended while its step was in flight.
        if not self.head.shares_target_cache:
            plan = result.plan
            computed = plan.table.state[plan.all_rows, COMPUTED]
            # While nothing is drafted, missing slots are written together later.
            self._writer.observe(plan, computed, result.hidden, result.hidden_offsets, fills_pages=self._has_drafted)
        self._has_drafted = False
        for reached, accepted in zip(result.teach(self._table).tolist(), result.accepted.tolist(), strict=True):
            self._draft_depth.record_acceptance(reached, accepted)

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """See `Drafter.finish`."""
        self._writer.finish(sequence)

    @torch.inference_mode()
    def propose(self, plan: StepPlan) -> Drafts:
        """See `Drafter.propose`."""
        at = np.flatnonzero([self._can_draft(plan, index) for index in range(plan.producers)])
        if not len(at):
            return Drafts.empty(plan.producers)
        part = plan.take(at)
        self._has_drafted = True
        if self._compiled is not None and self._can_compile(part.producing):
            drafts = self._draft_compiled(self._compiled, part)
        else:
            growth = self._grow(part)
            growth.keep_slots()
            drafts = growth.drafts(self._source)
        return drafts if len(at) == plan.producers else drafts.scatter(at, plan.producers)

    def _can_draft(self, plan: StepPlan, index: int) -> bool:
        """Whether the slots before the last token can be written: the target has computed all other tokens."""
        sequence = plan.producing[index]
        # A draft is at most as deep as it has tokens.
        depth = min(self._depth, int(plan.rooms[index]))
        has_room = depth > 0 and len(sequence) + depth <= self.head.config.max_positions
        if not has_room or plan.computed[index] != len(sequence) - 1:
            return False
        if self.head.shares_target_cache:
            return True
        slots = self._writer.of(sequence)
        return slots is not None and (slots.preemptions, slots.computed) == (sequence.preemptions, len(sequence) - 1)

    def _can_compile(self, sequences: SequenceOf[Sequence]) -> bool:
        samplings = (sequence.request.sampling for sequence in sequences)
        return not self._has_trees and all(can_sample(each, is_coupled=self._is_coupled) for each in samplings)

    def _draft_compiled(self, compiled: CompiledDrafting, plan: StepPlan) -> Drafts:
        output = self._writer.run_committed(plan.producing)
        price = self._draft_depth.price(plan.price)
        drafted = compiled.draft(plan.producing, plan.rooms, output, self._table, price, self._depth, self._source)
        if drafted.position_s is not None:
            self._draft_depth.record_forward(drafted.position_s)
        if drafted.is_stopped:
            self._draft_depth.record_stop()
        if not (self.head.state_size or self.head.shares_target_cache):
            for index, (sequence, count) in enumerate(zip(plan.producing, drafted.run.tolist(), strict=True)):
                slots = self._writer.of(sequence)
                assert slots is not None
                slots.drafted = drafted.drafts.batch.tokens_of(index)[:count]
        return drafted.drafts

    def _grow(self, plan: StepPlan) -> Growth:
        has_trees = self._has_trees and self._forward.runs_tree_parts
        growth = Growth(
            self.head,
            self._forward,
            self._writer,
            self._table,
            plan,
            branches=BRANCHES if has_trees else 1,
            is_coupled=self._is_coupled or has_trees,
        )
        began = perf_counter()
        for depth in range(1, self._depth + 1):
            growth.expand(depth)
            now = perf_counter()
            if depth > 1:
                self._draft_depth.record_forward(now - began)
            began = now
            nodes = growth.next_nodes()
            if depth == self._depth or not len(nodes):
                break
            if not self._draft_depth.price(plan.price).is_worthwhile(growth.pool.nodes.path_prob[nodes]):
                self._draft_depth.record_stop()
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
        table: AcceptanceTable,
        plan: StepPlan,
        *,
        branches: int,
        is_coupled: bool,
    ) -> None:
        """Run the tokens that were committed since the last draft.

        plan: of the sequences to draft for. branches: largest number of candidates after a node, and of nodes that are
        expanded at each depth.
        """
        self.pool = DraftPool()
        self._head, self._forward, self._writer, self._table = head, forward, writer, table
        self._sequences, self._rooms = plan.producing, plan.rooms
        self._sampler = DraftSampler(self._sequences, is_coupled=is_coupled)
        self._branches = branches
        self._runs: list[list[int]] = [[] for _ in self._sequences]
        """Nodes in the slots after the committed tokens of each sequence."""
        self._places = {ROOT: ROOT}
        """Index in `_runs` of each of these nodes."""
        output, count = writer.run_committed(self._sequences), len(self._sequences)
        self._frontier = HeadFrontier(np.arange(count), np.full(count, ROOT), output.state, output.hidden)

    def expand(self, depth: int) -> None:
        """Add candidates after each node of the frontier."""
        owner, node, _, hidden = self._frontier
        logits = self._head.target_logits(hidden)
        paths = [self.pool.path_to(each) for each in node.tolist()] if self._sampler.adjusts else None
        sampled = self._sampler.sample(logits, owner, depth - 1, self._branches, paths)
        is_sampled = self._sampler.is_sampled[owner]
        self._newest = self.pool.add_sampled(owner, node, sampled, self._table, is_sampled, depth)

    def next_nodes(self) -> np.ndarray:
        """Return the candidates of the last depth to expand, int64 [n], by sequence."""
        left = self._rooms - 1 - np.array([len(run) for run in self._runs])
        return self.pool.likeliest(self._newest, np.minimum(self._branches, left))

    def run(self, nodes: np.ndarray) -> None:
        """Run candidates of the last depth, int64 [n], by sequence; they become the frontier."""
        pool = self.pool.nodes
        owner = pool.owner[nodes]
        rows = self._forward.begin(self._spans(owner, nodes), on_target=self._head.shares_target_cache)
        device = self._forward.device
        states = self._frontier.states[on_device(self.pool.row[nodes], device)]
        tokens = on_device(pool.token[nodes], device)
        output = self._head(tokens, states, rows.positions, rows.attend, self._forward.ops)
        self._frontier = HeadFrontier(owner, nodes, output.state, output.hidden)

    def drafts(self, source: int) -> Drafts:
        """Return the likeliest candidates."""
        return self.pool.drafts(self._rooms, source)

    def keep_slots(self) -> None:
        """Record the path of draft tokens whose slots stay valid if they are committed."""
        if self._head.state_size or self._head.shares_target_cache:
            return  # The target's states replace those of the draft.
        tokens = self.pool.nodes.token
        for sequence, run in zip(self._sequences, self._runs, strict=True):
            slots = self._writer.of(sequence)
            assert slots is not None
            slots.drafted = tokens[run[: straight_length(self._parents(run))]].astype(np.uint32)

    def _spans(self, owner: np.ndarray, nodes: np.ndarray) -> list[DraftSpan]:
        """Return a span of nodes for each sequence, which are added to its slots."""
        before = {own: len(self._runs[own]) for own in owner.tolist()}
        for own, node in zip(owner.tolist(), nodes.tolist(), strict=True):
            self._places[node] = len(self._runs[own])
            self._runs[own].append(node)
        spans = []
        for own, start in before.items():
            sequence, run = self._sequences[own], self._runs[own]
            tree = None if self._branches == 1 else DraftTree(self._parents(run))
            spans.append(DraftSpan(sequence.pages, len(sequence) + start, len(run) - start, tree))
        return spans

    def _parents(self, run: list[int]) -> np.ndarray:
        """Return the indices of the parents of nodes in the slots of their sequence, int32 [n]."""
        return np.array([self._places[parent] for parent in self.pool.nodes.parent[run].tolist()], np.int32)


class HeadFrontier(NamedTuple):
    """The n nodes whose outputs are known and that have no candidates yet."""

    owner: np.ndarray
    """int64 [n]: index of the sequence, ascending."""
    node: np.ndarray
    """int64 [n]: index in the pool, `ROOT` for the last committed token."""
    states: Tensor
    """[n, S]: the head's state after each node."""
    hidden: Tensor
    """[n, hidden size]: input of the output projection."""
