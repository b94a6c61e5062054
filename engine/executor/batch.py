"""The ragged arrays of one step: prompts, single tokens and drafts in one row, made from the scheduled sequences."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from engine.scheduling.sequence import Sequence
from engine.speculation.draft_tree import DraftTree


@dataclass(frozen=True, eq=False)
class Span:
    """The part of a batch that belongs to one sequence."""

    start: int
    """Its first token within the batch."""
    length: int
    """Its tokens within the batch: scheduled ones, then the draft."""
    computed: int
    """Tokens before them, whose keys and values are in the cache."""
    pages: list[int]
    """Its page table."""
    tree: DraftTree | None = None
    """The shape of the draft at its end, if that has branches."""

    @property
    def committed(self) -> int:
        """Tokens before the draft, if that has branches."""
        return self.computed + self.length - (0 if self.tree is None else len(self.tree.parents))


@dataclass(frozen=True, eq=False)
class Batch:
    """N tokens of one step."""

    tokens: np.ndarray
    """int64 [N]."""
    positions: np.ndarray
    """int64 [N]: within each token's text; in a draft tree, tokens of the same depth have the same one."""
    slots: np.ndarray
    """int64 [N]: where each token's keys and values go, page * page_size + offset."""
    spans: list[Span]
    """In the order of the sequences."""
    logit_rows: np.ndarray
    """int64 [M]: tokens whose logits are needed, the last committed one and the draft of every sequence that is to
    produce. Behind those, prompt tokens whose successors' log-probabilities were asked for."""
    logit_offsets: np.ndarray
    """int64 [sequences + 1], into `logit_rows`, of those that produce."""
    scored_offsets: np.ndarray
    """int64 [sequences + 1], into `logit_rows`, of the prompt tokens."""


def build_batch(sequences: SequenceOf[Sequence], page_size: int) -> Batch:
    """The batch of a step; each sequence brings its `scheduled` tokens and its `draft`."""
    tokens, spans, page_shifts, wanted, scored_rows, scored_counts = [], [], [], [], [], [0]
    pages: list[int] = []
    start = 0
    for sequence in sequences:
        computed, drafted = sequence.computed, len(sequence.draft)
        end = computed + sequence.scheduled
        length = sequence.scheduled + drafted
        tokens.append(sequence.tokens[computed:end])
        if drafted:
            tokens.append(sequence.draft)
        first_page = computed // page_size
        page_shifts.append(len(pages) - first_page)
        pages += sequence.pages[first_page : (computed + length - 1) // page_size + 1]
        spans.append(Span(start, length, computed, sequence.pages, sequence.tree))
        wanted.append(1 + drafted if sequence.completes_prompt else 0)
        scored = sequence.scored
        if scored:
            scored_rows.append(np.arange(scored.start, scored.stop) - computed + start)
        scored_counts.append(len(scored))
        start += length
    lengths = np.array([span.length for span in spans])
    starts = np.array([span.start for span in spans])
    places = np.arange(start) + np.repeat(np.array([span.computed for span in spans]) - starts, lengths)
    page_indices = places // page_size + np.repeat(page_shifts, lengths)
    slots = np.array(pages, np.int64)[page_indices] * page_size + places % page_size
    logit_offsets = np.cumsum([0, *wanted])
    logit_rows = np.arange(logit_offsets[-1]) + np.repeat(starts + lengths - logit_offsets[1:], wanted)
    return Batch(
        tokens=np.concatenate(tokens, dtype=np.int64),
        positions=_positions(places, spans),
        slots=slots,
        spans=spans,
        logit_rows=np.concatenate([logit_rows, *scored_rows]),
        logit_offsets=logit_offsets,
        scored_offsets=logit_offsets[-1] + np.cumsum(scored_counts),
    )


def _positions(places: np.ndarray, spans: SequenceOf[Span]) -> np.ndarray:
    """int64 [N]: as the tokens lie in their sequences, `places`, but for trees, where siblings share a position."""
    for span in spans:
        if span.tree is not None:
            end = span.start + span.length
            first = end - len(span.tree.depths)
            places[first:end] = places[first] - 1 + span.tree.depths
    return places
