"""The ragged arrays of one step: prompt chunks, single tokens, drafts and extra rows of all sequences, in order."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.scheduling.plan import NO_ROWS, SequencePlan
from engine.speculation.draft_tree import DraftTree
from ssd.kernels.jit import Int, LongRows, Longs, Nothing, kernel
from ssd.types import ROOT


class Span(NamedTuple):
    """The part of a batch that belongs to one sequence."""

    start: int
    """Index of its first token in the batch."""
    length: int
    """Number of its tokens in the batch: scheduled tokens, then the draft, then the drafter's extra rows."""
    computed: int
    """Number of the sequence's tokens before the span; their keys and values are in the cache."""
    pages: list[int]
    """The sequence's page table."""
    tree: DraftTree | None = None
    """Shape of the draft and the extra rows at its end; None for a path. A drafter's span may begin within it."""
    adapter: str | None = None
    """Name of the sequence's LoRA adapter; None without one."""

    @property
    def committed(self) -> int:
        """Number of tokens before the draft tree."""
        return self.computed + self.length - (0 if self.tree is None else len(self.tree.parents))


@dataclass(frozen=True, eq=False)
class Batch:
    """The N tokens of one step."""

    tokens: np.ndarray
    """int64 [N]."""
    positions: np.ndarray
    """int64 [N]: position in the text; tokens of a draft tree at the same depth have the same position."""
    slots: np.ndarray
    """int64 [N]: slots for keys and values, page * page_size + offset."""
    spans: list[Span]
    """One per sequence."""
    logit_rows: np.ndarray
    """int64 [M]: tokens whose logits are needed: the last committed token and the draft of each producing sequence,
    then prompt tokens that are scored, see `SequencePlan.scored`, then extra rows."""
    logit_offsets: np.ndarray
    """int64 [sequences + 1]: offsets into `logit_rows` of each producing sequence's rows."""
    scored_offsets: np.ndarray
    """int64 [sequences + 1]: offsets into `logit_rows` of each sequence's scored prompt tokens."""
    extra_offsets: np.ndarray = field(default_factory=lambda: NO_ROWS)
    """int64 [sequences + 1]: offsets into `logit_rows` of each sequence's extra rows; may be empty without any."""


def build_batch(entries: SequenceOf[SequencePlan], page_size: int) -> Batch:
    """Return the batch of a step: the scheduled tokens, the draft and the extra rows of each entry."""
    tokens, spans, wanted, scored_rows, scored_counts = [], [], [], [], [0]
    start = 0
    for entry in entries:
        sequence, computed, drafted = entry.sequence, entry.computed, len(entry.draft)
        length = entry.scheduled + drafted + len(entry.extra)
        tokens.append(sequence.tokens[computed : computed + entry.scheduled])
        if drafted:
            tokens.append(entry.draft)
        if len(entry.extra):
            tokens.append(entry.extra)
        spans.append(Span(start, length, computed, sequence.pages, _tree(entry), sequence.request.adapter))
        wanted.append(1 + drafted if entry.produces else 0)
        scored = entry.scored
        if scored:
            scored_rows.append(np.arange(scored.start, scored.stop) - computed + start)
        scored_counts.append(len(scored))
        start += length
    ends = np.array([span.start + span.length for span in spans])
    slots, positions = slots_and_positions(spans, page_size)
    logit_offsets = np.cumsum([0, *wanted])
    scored_offsets = logit_offsets[-1] + np.cumsum(scored_counts)
    extra = np.array([len(entry.extra) for entry in entries])
    logit_rows = _rows_before(ends - extra, np.array(wanted))
    extra_rows = _rows_before(ends, extra)
    return Batch(
        tokens=np.concatenate(tokens, dtype=np.int64),
        positions=positions,
        slots=slots,
        spans=spans,
        logit_rows=np.concatenate([logit_rows, *scored_rows, extra_rows]),
        logit_offsets=logit_offsets,
        scored_offsets=scored_offsets,
        extra_offsets=scored_offsets[-1] + np.append(0, extra.cumsum()),
    )


def slots_and_positions(spans: SequenceOf[Span], page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `Batch.slots` and `Batch.positions` of spans."""
    pages, places, size = list[int](), [], 0
    for span in spans:
        first = span.computed // page_size
        places.append((span.computed, span.length, len(pages) - first))
        pages += span.pages[first : (span.computed + span.length - 1) // page_size + 1]
        size += span.length
    slots, positions = np.empty(size, np.int64), np.empty(size, np.int64)
    _fill_slots(np.array(places), np.array(pages, np.int64), page_size, slots, positions)
    for span in spans:
        if span.tree is not None:
            end, count = span.start + span.length, min(span.length, len(span.tree.parents))
            positions[end - count : end] = span.committed - 1 + span.tree.depths[-count:]
    return slots, positions


@kernel(LongRows, Longs, Int, Longs, Longs, returns=Nothing)
def _fill_slots(places, pages, page_size, slots, positions):
    """Write the slots and positions of spans without trees.

    places: the first position and the length of each span, and the difference between the index of a page in `pages`
    and in its sequence's page table.
    """
    row = 0
    for start, length, shift in places:
        for position in range(start, start + length):
            slots[row] = pages[shift + position // page_size] * page_size + position % page_size
            positions[row] = position
            row += 1


def _rows_before(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the `counts` rows before each of `ends`, int64 [sum of counts]."""
    total = counts.cumsum()
    return np.arange(total[-1]) + (ends - total).repeat(counts)


def _tree(entry: SequencePlan) -> DraftTree | None:
    """Return the shape of an entry's draft and extra rows; None if they are a path."""
    if entry.extra_tree is None:
        return entry.tree
    draft = entry.parents
    extra = entry.extra_tree.parents
    shifted = np.where(extra == ROOT, ROOT, extra + len(draft))
    return DraftTree(np.concatenate((draft, shifted), dtype=np.int32, casting="same_kind"))
