"""Combine drafters: their drafts are merged into one tree per sequence.

Drafters of tokens run first. Drafters that run a network are called unless what the others offer the batch is
worth more without the time that networks take (`pricing.py`). Then the corpus is searched again after each token of
their drafts. Every candidate gets one calibrated probability (`ssd.merged_tree`), and the likeliest ones are drafted.

SpecInfer (Miao et al., 2024) merges the trees of several draft models. TensorRT-LLM and Arctic Inference replace the
draft of a model with that of a suffix structure where the match is long enough.

Candidates are chosen by their probabilities, so rejection sampling cannot verify them; they are verified by comparison
with the target's tokens for requests in either mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np

from engine.drafters.base import Drafter, TargetOutputs
from engine.drafters.draft_forward import DraftForward
from engine.drafters.drafts import Drafts
from engine.drafters.pricing import SkipRule
from engine.drafters.tokens import TokenDrafter
from engine.scheduling.plan import NO_ROWS, StepPlan
from engine.scheduling.result import StepResult
from engine.scheduling.sequence import Sequence
from ssd.corpus.corpus import Corpus
from ssd.merged_tree import Evaluation, Mix, Tree, best_path, likeliest_nodes
from ssd.types import ROOT, DraftBatch, offsets_of

ROOM = 96
"""Largest number of nodes of a merged tree, of which the likeliest are drafted."""


@dataclass(frozen=True)
class Component:
    """One of the combined drafters."""

    kind: str
    drafter: Drafter
    runs_model: bool
    """Whether drafting takes forward passes."""

    def may_draft_for(self, sequence: Sequence) -> bool:
        """Whether the request allows this drafter."""
        drafters = sequence.request.drafters
        return drafters is None or self.kind in drafters


class Merged:
    """The merged tree of one sequence, until its results are known."""

    def __init__(self, drafters: int) -> None:
        self.tree = Tree.empty(ROOM, drafters)
        self.sources = np.zeros(ROOM, np.uint8)
        """uint8 [ROOM]: source of each node, that of the first drafter that proposed it."""
        self.found: Evaluation | None = None
        self.ranked = NO_ROWS
        """int64 [n]: nodes of the best draft according to `found`, parents before their children."""

    def add(self, batch: DraftBatch, index: int, number: int, below: int = ROOT) -> None:
        """Add draft `index` of a batch, by the drafter `number`, below a node."""
        part = slice(int(batch.offsets[index]), int(batch.offsets[index + 1]))
        before = self.tree.size
        self.tree, nodes = self.tree.add(
            batch.tokens[part], batch.parents[part], batch.accept_prob[part], number, below
        )
        is_new = nodes >= before
        self.sources[nodes[is_new]] = batch.source[part][is_new]


class Proposal(NamedTuple):
    """Drafts of a step, until its results are known."""

    rows: np.ndarray
    """int64 [B]: rows of the sequences in the table."""
    merged: list[Merged]
    """Their trees."""
    own: list[Drafts]
    """The drafts of each drafter, by its number."""


NO_PROPOSAL = Proposal(NO_ROWS, [], [])


class CombinedDrafter(Drafter):
    """Merges the drafts of several drafters."""

    def __init__(self, parts: SequenceOf[Component], *, has_trees: bool) -> None:
        # Drafters of tokens run first.
        self.parts = sorted(parts, key=lambda part: part.runs_model)
        self.needs = joint_needs([part.drafter.needs for part in self.parts])
        self.copies = [copy for part in self.parts for copy in part.drafter.copies]
        self._skipping = SkipRule()
        self._has_trees = has_trees
        self._mix = Mix(len(self.parts))
        self._last = NO_PROPOSAL
        """Drafts since the last results."""

    @property
    def is_trusted(self) -> bool:
        """See `Drafter`."""
        return all(part.drafter.is_trusted for part in self.parts)

    @property
    def is_connected(self) -> bool | None:
        """See `Drafter`; that of the remote drafter among the drafters."""
        return next((state for part in self.parts if (state := part.drafter.is_connected) is not None), None)

    @property
    def skipped_steps(self) -> dict[str, int]:
        """Number of steps in which each network was not called, by kind."""
        return {part.kind: self._skipping.skipped for part in self.parts if part.runs_model}

    def corpora(self, adapter: str | None = None) -> Iterator[Corpus]:
        """See `Drafter`."""
        for part in self.parts:
            yield from part.drafter.corpora(adapter)

    def bind(self, forward: DraftForward) -> None:
        """Give each drafter access to its own layers in the KV pages."""
        first = 0
        for part in self.parts:
            end = first + len(part.drafter.needs.layers)
            part.drafter.bind(forward.part(slice(first, end)))
            first = end

    def weights_changed(self) -> None:
        """See `Drafter`."""
        for part in self.parts:
            part.drafter.weights_changed()

    def start(self, sequence: Sequence) -> None:
        """See `Drafter.start`."""
        self._call_all(lambda drafter, _: drafter.start(sequence))

    def propose(self, plan: StepPlan) -> Drafts:
        """See `Drafter.propose`."""
        merged = [Merged(len(self.parts)) for _ in plan.producing]
        own = [Drafts.empty(plan.producers)] * len(self.parts)

        def draft(numbers: list[int]) -> None:
            for number in numbers:
                own[number] = self._draft(self.parts[number], plan)
                for index, one in enumerate(merged):
                    one.add(own[number].batch, index, number)

        draft([number for number, part in enumerate(self.parts) if not part.runs_model])
        before = self._expected(plan, merged)
        models = [number for number, part in enumerate(self.parts) if part.runs_model]
        if models and self._skipping.should_run_networks(plan, before):
            began = perf_counter()
            draft(models)
            self._search_again(plan, merged)
            self._skipping.learn(before, self._expected(plan, merged), perf_counter() - began)
        self._last = Proposal(plan.rows, merged, own)
        return Drafts(joint_drafts(merged), extra=next((each.extra for each in own if each.extra is not None), None))

    def observe(self, result: StepResult) -> None:
        """See `Drafter.observe`."""
        last, self._last = self._last, NO_PROPOSAL
        at = result.plan.indices_of(last.rows)
        for index, one in zip(at.tolist(), last.merged, strict=True):
            if one.found is not None and result.lengths[index]:
                self._mix.learn(one.tree, one.found, result.tokens_of(index))
        count = result.plan.producers
        own = [drafts.scatter(at, count) for drafts in last.own] or [Drafts.empty(count)] * len(self.parts)
        results = [self._own_result(result, *pair) for pair in zip(own, self.parts, strict=True)]
        self._call_all(lambda drafter, number: drafter.observe(results[number]))

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """See `Drafter.finish`."""
        self._call_all(lambda drafter, _: drafter.finish(sequence, learn))

    def close(self) -> None:
        """See `Drafter.close`."""
        self._call_all(lambda drafter, _: drafter.close())

    def _call_all(self, call: Callable[[Drafter, int], None]) -> None:
        """Call a function with each drafter and its number, in any order, also with those after one that raises."""
        with ExitStack() as calls:
            for number, part in enumerate(self.parts):
                calls.callback(call, part.drafter, number)

    def _draft(self, part: Component, plan: StepPlan) -> Drafts:
        """Return the drafts of one drafter, for the requests that allow it."""
        allowed = [index for index, sequence in enumerate(plan.producing) if part.may_draft_for(sequence)]
        if len(allowed) == plan.producers:
            return part.drafter.propose(plan)
        if not allowed:
            return Drafts.empty(plan.producers)
        at = np.array(allowed, np.int64)
        return part.drafter.propose(plan.take(at)).scatter(at, plan.producers)

    def _expected(self, plan: StepPlan, merged: SequenceOf[Merged]) -> np.ndarray:
        """Evaluate the trees, and return the expected number of accepted tokens of each, float64 [B]."""
        expected = np.zeros(plan.producers)
        for index, (room, one) in enumerate(zip(plan.rooms.tolist(), merged, strict=True)):
            one.found = self._mix.evaluate(one.tree)
            if self._has_trees:
                one.ranked = likeliest_nodes(one.found.path_prob, room)
            else:
                one.ranked = best_path(one.tree.parents[: one.tree.size], one.found.path_prob, room)
            expected[index] = one.found.path_prob[one.ranked].sum()
        return expected

    def _search_again(self, plan: StepPlan, merged: list[Merged]) -> None:
        """Add what drafters of tokens propose after each token of the networks' likeliest paths."""
        paths = [self._model_path(one) for one in merged]
        for number, part in enumerate(self.parts):
            if not isinstance(part.drafter, TokenDrafter):
                continue
            places = [
                (index, end)
                for index, path in enumerate(paths)
                for end in range(1, len(path) + 1)
                if merged[index].tree.probs[path[end - 1], number] < 0 and part.may_draft_for(plan.producing[index])
            ]
            if not places:
                continue
            runs = [merged[index].tree.tokens[paths[index][:end]].astype(np.uint32) for index, end in places]
            batch = part.drafter.draft_after(plan, [index for index, _ in places], runs)
            for row, (index, end) in enumerate(places):
                merged[index].add(batch, row, number, below=int(paths[index][end - 1]))

    def _model_path(self, one: Merged) -> np.ndarray:
        """Return the nodes of the likeliest path that a network drafted, int64 [n]."""
        size = one.tree.size
        models = [number for number, part in enumerate(self.parts) if part.runs_model]
        prob = one.tree.probs[:size, models].max(axis=1, initial=-1.0)
        path: list[int] = []
        at = ROOT
        while True:
            children = np.flatnonzero((one.tree.parents[:size] == at) & (prob >= 0))
            if not len(children):
                return np.array(path, np.int64)
            at = int(children[prob[children].argmax()])
            path.append(at)

    def _own_result(self, result: StepResult, drafts: Drafts, part: Component) -> StepResult:
        """Return the results as one of the drafters would see them, if only its own drafts had been verified.

        Candidates at a position whose tokens were committed have a result even if the step did not verify them.
        """
        needs = part.drafter.needs
        if needs.top_k:  # It learns from the logits of the tokens that were verified.
            own = result.with_drafts(result.plan.drafts, NO_ROWS)
        else:
            own = result.with_drafts(drafts, np.arange(result.plan.producers))
        if result.hidden is not None:
            layers = [self.needs.hidden_layers.index(layer) for layer in needs.hidden_layers]
            own.hidden = result.hidden[:, layers] if layers else None
        if result.top_tokens is not None and result.top_logits is not None:
            own.top_tokens, own.top_logits = result.top_tokens[:, : needs.top_k], result.top_logits[:, : needs.top_k]
        return own


def joint_needs(needs: SequenceOf[TargetOutputs]) -> TargetOutputs:
    """Return what several drafters need together. Raises ValueError if two of them need extra rows."""
    if sum(each.extra_rows > 0 for each in needs) > 1:
        raise ValueError("at most one of the combined drafters may add rows to the target's batch")
    return TargetOutputs(
        hidden_layers=tuple(sorted({layer for each in needs for layer in each.hidden_layers})),
        top_k=max(each.top_k for each in needs),
        layers=tuple(layers for each in needs for layers in each.layers),
        extra_rows=max(each.extra_rows for each in needs),
    )


def joint_drafts(merged: SequenceOf[Merged]) -> DraftBatch:
    """Return the ranked nodes of each tree as drafts."""
    parents, probs = [], []
    for one in merged:
        place = np.full(one.tree.size + 1, ROOT)
        place[one.ranked] = np.arange(len(one.ranked))
        parents.append(place[one.tree.parents[one.ranked]])
        assert one.found is not None
        probs.append(one.found.accept_prob[one.ranked])
    return DraftBatch(
        np.concatenate([one.tree.tokens[one.ranked] for one in merged]).astype(np.uint32),
        np.concatenate(parents).astype(np.int32),
        np.concatenate(probs).astype(np.float32),
        np.concatenate([one.sources[one.ranked] for one in merged]).astype(np.uint8),
        offsets_of(np.array([len(one.ranked) for one in merged])),
    )
