"""The ragged arrays of one step: prompt chunks, single tokens, drafts and extra rows of all sequences, in order."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from engine.scheduling.plan import NO_ROWS, NO_TOKENS, StepPlan
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import KIND, NEEDS_HOST, TEXT
from ssd.kernels.jit import Int, IntRows, LongRows, Longs, Nothing, Parents, Tokens, kernel, peek
from ssd.types import ROOT

NO_PARENTS = np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class Batch:
    """The N tokens of B sequences that run together; of each its scheduled tokens, its draft, and its extra rows."""

    tokens: np.ndarray
    """int64 [N]."""
    positions: np.ndarray
    """int64 [N]: position in the text; tokens of a draft tree at the same depth have the same position."""
    slots: np.ndarray
    """int64 [N]: slots for keys and values, page * page_size + offset."""
    starts: np.ndarray
    """int64 [B + 1]: index of the first token of each sequence."""
    computed: np.ndarray
    """int64 [B]: number of tokens of each sequence before those of the batch: their keys and values are cached."""
    pages: np.ndarray
    """int32 [B, M]: page tables; the content after the last page in use is arbitrary."""
    parents: np.ndarray
    """int32 [K]: parents of the nodes of draft trees, which are the last tokens of their sequences. The tokens of a
    drafter may begin within a tree, whose earlier nodes are in the cache."""
    nodes: np.ndarray
    """int64 [B + 1]: offsets into `parents` of the tree of each sequence, which is empty for a path."""
    adapters: SequenceOf[str | None] = ()
    """Names of the LoRA adapters of the sequences; may be empty if none has one."""
    logit_rows: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [M]: tokens whose logits are needed: the last committed token and the draft of each producing sequence,
    then prompt tokens that are scored, see `scored`, then extra rows."""
    logit_offsets: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [P + 1]: offsets into `logit_rows` of each producing sequence's rows."""
    scored_offsets: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [B + 1]: offsets into `logit_rows` of each sequence's scored prompt tokens."""

    @property
    def lengths(self) -> np.ndarray:
        """int64 [B]: number of tokens of each sequence in the batch."""
        return np.diff(self.starts)

    @property
    def committed(self) -> np.ndarray:
        """int64 [B]: number of tokens of each sequence before those of its tree."""
        return self.computed + self.lengths - np.diff(self.nodes)

    def rows_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows of some sequences, int64."""
        return rows_before(self.starts[1:][indices], self.lengths[indices])

    def take(self, indices: np.ndarray) -> Batch:
        """Return the part of some sequences, int64 [n], without logits."""
        rows, nodes = self.rows_of(indices), np.diff(self.nodes)[indices]
        return Batch(
            self.tokens[rows] if len(self.tokens) else self.tokens, self.positions[rows], self.slots[rows],
            offsets(self.lengths[indices]), self.computed[indices], self.pages[indices],
            self.parents[rows_before(self.nodes[1:][indices], nodes)], offsets(nodes),
            [self.adapters[index] for index in indices] if self.adapters else (),
        )  # fmt: skip


def build_batch(plan: StepPlan, page_size: int) -> Batch:
    """Return the batch of a step."""
    table, drafts, lengths = plan.table, plan.drafts.batch, plan.lengths
    extra_tokens, extra_offsets = NO_TOKENS, np.zeros(plan.producers + 1, np.uint32)
    if plan.drafts.extra is not None:
        extra_tokens, extra_offsets = plan.drafts.extra.tokens, plan.drafts.extra.offsets
    extra = np.diff(extra_offsets.astype(np.int64))
    sizes = plan.scheduled.copy()
    sizes[: plan.producers] += lengths + extra
    starts = offsets(sizes)
    parents, nodes = _trees(plan, extra)
    tokens = np.empty(int(starts[-1]), np.int64)
    _fill_tokens(
        table.state, plan.all_rows, plan.computed, plan.scheduled, starts, drafts.tokens, drafts.offsets, lengths,
        extra_tokens, extra_offsets, tokens,
    )  # fmt: skip
    pages = table.pages[plan.all_rows, : -(-int((plan.computed + sizes).max(initial=0)) // page_size)]
    positions, slots = place(starts, plan.computed, pages, parents, nodes, page_size)
    sequences = table.of(plan.all_rows)
    ends = starts[1 : plan.producers + 1]
    scored_rows, scored_counts = _scored_rows(plan, starts)
    logit_offsets = offsets(1 + lengths)
    return Batch(
        tokens, positions, slots, starts, plan.computed, pages, parents, nodes,
        [sequence.request.adapter for sequence in sequences],
        np.concatenate((rows_before(ends - extra, 1 + lengths), scored_rows, rows_before(ends, extra))),
        logit_offsets, logit_offsets[-1] + offsets(scored_counts),
    )  # fmt: skip


def place(
    starts: np.ndarray, computed: np.ndarray, pages: np.ndarray, parents: np.ndarray, nodes: np.ndarray, page_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return `Batch.positions` and `Batch.slots` for the other arrays of a `Batch`."""
    positions, slots = np.empty((2, int(starts[-1])), np.int64)
    _place(starts, computed, pages, parents, nodes, page_size, positions, slots)
    return positions, slots


def scored(sequence: Sequence, computed: int, scheduled: int) -> range:
    """Return the positions of prompt tokens whose logits give the requested log-probabilities of the next ones."""
    if sequence.request.sampling.prompt_logprobs is None:
        return range(0)
    last = len(sequence.request.prompt) - 1
    done = sum(len(part.tokens) for part in sequence.prompt_logprobs)
    assert min(computed, last) <= done, "prompt tokens whose log-probabilities are requested were not run"
    return range(done, min(computed + scheduled, last))


def offsets(counts: np.ndarray) -> np.ndarray:
    """Return where consecutive ranges begin, and the end of the last one, int64 [B + 1]. counts: int64 [B]."""
    return np.append(0, np.cumsum(counts))


def rows_before(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the `counts` rows before each of `ends`, int64 [sum of counts]."""
    total = counts.cumsum()
    return np.arange(total[-1] if len(total) else 0) + (ends - total).repeat(counts)


def _trees(plan: StepPlan, extra: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `Batch.parents` and `Batch.nodes`: trees of drafts and extra rows."""
    sizes, parts = np.zeros(len(plan), np.int64), [NO_PARENTS]
    batch, rows = plan.drafts.batch, plan.drafts.extra
    for index in np.flatnonzero(plan.is_tree | (extra > 0)).tolist():
        length = int(plan.lengths[index])
        parts.append(batch.parents_of(index)[:length])
        if rows is not None:
            own = rows.parents[rows.offsets[index] : rows.offsets[index + 1]]
            parts.append(np.where(own == ROOT, ROOT, own + length).astype(np.int32))
        sizes[index] = length + extra[index]
    return np.concatenate(parts), offsets(sizes)


def _scored_rows(plan: StepPlan, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of prompt tokens that are scored, int64, and their number for each sequence, int64 [B]."""
    counts, parts = np.zeros(len(plan), np.int64), [NO_ROWS]
    for index in np.flatnonzero(plan.table.state[plan.all_rows, KIND] & NEEDS_HOST).tolist():
        [sequence], computed = plan.table.of(plan.all_rows[index : index + 1]), int(plan.computed[index])
        positions = scored(sequence, computed, int(plan.scheduled[index]))
        parts.append(np.arange(positions.start, positions.stop) - computed + starts[index])
        counts[index] = len(positions)
    return np.concatenate(parts), counts


@kernel(LongRows, Longs, Longs, Longs, Longs, Tokens, Tokens, Longs, Tokens, Tokens, Longs, returns=Nothing)
def _fill_tokens(
    state, rows, computed, scheduled, starts, drafts, draft_offsets, lengths, extra, extra_offsets, tokens
):
    """Write the scheduled tokens, the draft and the extra rows of each sequence."""
    for index in range(len(rows)):
        at, text = starts[index], state[rows[index], TEXT]
        for place in range(scheduled[index]):
            tokens[at + place] = peek(text, computed[index] + place)
        if index >= len(lengths):
            continue
        at += scheduled[index]
        for place in range(lengths[index]):
            tokens[at + place] = drafts[draft_offsets[index] + place]
        at += lengths[index]
        for place in range(extra_offsets[index], extra_offsets[index + 1]):
            tokens[at + place - np.int64(extra_offsets[index])] = extra[place]


@kernel(Longs, Longs, IntRows, Parents, Longs, Int, Longs, Longs, returns=Nothing)
def _place(starts, computed, pages, parents, nodes, page_size, positions, slots):
    for index in range(len(computed)):
        length, first, size = starts[index + 1] - starts[index], nodes[index], nodes[index + 1] - nodes[index]
        committed = computed[index] + length - size
        depths = np.empty(size, np.int64)
        for node in range(size):
            parent = parents[first + node]
            depths[node] = depths[parent] + 1 if parent >= 0 else 1
        for row in range(starts[index], starts[index + 1]):
            slot = computed[index] + row - starts[index]
            slots[row] = pages[index, slot // page_size] * page_size + slot % page_size
            positions[row] = slot if slot < committed else committed - 1 + depths[slot - committed]
