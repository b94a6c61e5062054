"""The ragged arrays of one step: prompts, single tokens and drafts in one row, made from the scheduled sequences."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from engine.sequence import Sequence
from engine.tree import DraftTree


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
    tokens, slots, spans, logit_rows = [], [], [], []
    positions: list[np.ndarray] = []
    scored_rows, logit_counts, scored_counts = [], [0], [0]
    start = 0
    for sequence in sequences:
        end = sequence.computed + sequence.scheduled
        length = sequence.scheduled + len(sequence.draft)
        tokens += [sequence.tokens[sequence.computed : end], sequence.draft]
        place = np.arange(sequence.computed, sequence.computed + length)
        positions += [place] if sequence.tree is None else [place[: sequence.scheduled], end - 1 + sequence.tree.depths]
        page_table = np.asarray(sequence.pages, np.int64)
        slots.append(page_table[place // page_size] * page_size + place % page_size)
        spans.append(Span(start, length, sequence.computed, sequence.pages, sequence.tree))
        wanted = 1 + len(sequence.draft) if sequence.completes_prompt else 0
        logit_rows.append(np.arange(start + length - wanted, start + length))
        logit_counts.append(wanted)
        scored = sequence.scored
        if scored:
            scored_rows.append(np.arange(scored.start, scored.stop) - sequence.computed + start)
        scored_counts.append(len(scored))
        start += length
    return Batch(
        tokens=np.concatenate(tokens, dtype=np.int64),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        spans=spans,
        logit_rows=np.concatenate(logit_rows + scored_rows),
        logit_offsets=np.cumsum(logit_counts),
        scored_offsets=sum(logit_counts) + np.cumsum(scored_counts),
    )
