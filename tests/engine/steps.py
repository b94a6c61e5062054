"""Plans of steps that no scheduler made, and results as an object per sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from engine.drafters.drafts import Drafts, ExtraRows
from engine.executor.batch import build_batch
from engine.scheduling.kernels import FIRST_TOKEN, PRODUCED
from engine.scheduling.plan import NO_ROWS, StepPlan
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import ADMISSION, COMPUTED, KIND, PAGES, RequestTable
from engine.speculation.draft_tree import DraftTree
from ssd.budget.token_budget import StepPrice
from tests.engine.trees import batch_of_trees


@dataclass
class Entry:
    """One sequence of a step: `scheduled` tokens after the `computed` ones, a draft, and extra rows."""

    sequence: Sequence
    computed: int
    scheduled: int
    draft: np.ndarray = field(default_factory=lambda: NO_ROWS)
    tree: DraftTree | None = None
    extra: np.ndarray = field(default_factory=lambda: NO_ROWS)
    extra_tree: DraftTree | None = None

    @property
    def produces(self):
        return self.computed + self.scheduled == len(self.sequence)


def plan_of(parts):
    """The plan of a step of sequences without rows; those that produce tokens come first."""
    assert [part.produces for part in parts] == sorted((part.produces for part in parts), reverse=True)
    table = RequestTable(len(parts), max(len(part.sequence.held_pages) for part in parts))
    for row, part in enumerate(parts):
        table.state[row], table.sequences[row] = part.sequence.state, part.sequence
        table.pages[row, : part.sequence.state[PAGES]] = part.sequence.held_pages
    producing = [part for part in parts if part.produces]
    drafts = batch_of_trees([(part.draft, parents_of(part.draft, part.tree)) for part in producing])
    extra = batch_of_trees([(part.extra, parents_of(part.extra, part.extra_tree)) for part in producing])
    return StepPlan(
        table, np.arange(len(parts)), np.array([part.scheduled for part in parts]), len(producing),
        computed=np.array([part.computed for part in parts]), admissions=table.state[: len(parts), ADMISSION],
        kinds=int(np.bitwise_or.reduce(table.state[: len(producing), KIND])),
        drafts=Drafts(drafts, extra=ExtraRows(extra.tokens, extra.parents, extra.offsets)),
        lengths=np.array([len(part.draft) for part in producing], np.int64), extra_rows=len(extra.tokens),
    )  # fmt: skip


def parents_of(tokens, tree):
    return np.arange(-1, len(tokens) - 1) if tree is None else tree.parents


def batch_of(parts, page_size):
    """The batch of a step of sequences without rows."""
    return build_batch(plan_of(parts), page_size)


def plan_of_rows(table, sequences, room=4, **settings):
    """The plan of a step in which sequences of a table run their last tokens."""
    rows, count = np.array([sequence.row for sequence in sequences], np.int64), len(sequences)
    return StepPlan(
        table, rows, NO_ROWS, count, computed=table.state[rows, COMPUTED], admissions=table.state[rows, ADMISSION],
        rooms=np.full(count, room), drafts=Drafts.empty(count), lengths=np.zeros(count, np.int64), **settings,
    )  # fmt: skip


def counted_plan(sequences=1, *, verified=0, room=16, prompt_tokens=0, **settings):
    """The plan of a step of so many sequences, each with a draft of `verified` tokens, and of a chunk of a prompt."""
    chunks = np.array([prompt_tokens] if prompt_tokens else [], np.int64)
    return StepPlan(
        RequestTable(0, 0), np.arange(sequences + len(chunks)), chunks, sequences,
        rooms=np.full(sequences, room), lengths=np.full(sequences, verified), **settings,
    )  # fmt: skip


class AllTokens:
    """A selection of draft tokens that calls the drafter in each step and verifies all."""

    def admits(self, plan):
        return True

    def price(self, plan):
        return StepPrice(100.0, 0.03)

    def select(self, plan, drafts, usable):
        return usable

    def record(self, plan, accepted, committed, seconds):
        pass


def each_of(result):
    """The results of the sequences with committed tokens, one by one; `result` may be None."""
    for index in [] if result is None else np.flatnonzero(result.lengths).tolist():
        batch, own = result.plan.drafts.batch, result.draft_of(index)
        first, end = (1 + result.verified)[:index].sum(), (1 + result.verified)[: index + 1].sum()
        yield SimpleNamespace(
            sequence_id=int(result.ids[index]),
            sequence=result.plan.producing[index],
            tokens=result.tokens_of(index),
            draft=batch.tokens[own],
            draft_depths=result.draft_depths[own],
            drafted=int(result.verified[index]),
            kept=result.path_of(index),
            accepted=int(result.accepted[index]),
            sources=batch.source[own],
            extra_tokens=result.extra_of(index),
            top_tokens=None if result.top_tokens is None else result.top_tokens[first:end],
            top_logits=None if result.top_logits is None else result.top_logits[first:end],
            hidden=None if result.hidden is None else result.hidden_of(index),
            room=int(result.plan.rooms[index]),
        )


def spans_of(batch):
    """The part of each sequence of a batch."""
    for index, start in enumerate(batch.starts[:-1].tolist()):
        yield SimpleNamespace(
            start=start,
            length=int(batch.lengths[index]),
            computed=int(batch.computed[index]),
            committed=int(batch.committed[index]),
            pages=batch.pages[index].tolist(),
            parents=batch.parents[batch.nodes[index] : batch.nodes[index + 1]],
        )


def accepting(choose):
    """A twin of `accept_exactly` that accepts what `choose` returns for draft, parents and the target's tokens."""

    def accept(tokens, parents, offsets, lengths, indices, targets, bounds, values, paths):
        for place, index in enumerate(indices.tolist()):
            own = slice(int(offsets[index]), int(offsets[index]) + int(lengths[index]))
            target = targets[bounds[place] : bounds[place + 1]]
            path = np.array(choose(tokens[own], parents[own], target), np.int64)
            paths[index, : len(path)] = path
            last = path[-1] if len(path) else -1
            values[index, FIRST_TOKEN : FIRST_TOKEN + len(path) + 1] = [*tokens[own][path], target[1 + last]]
            values[index, PRODUCED] = len(path) + 1

    return accept
