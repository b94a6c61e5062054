"""Draft after given tokens without changing any state that later drafts depend on.

A step of the kernel commits tokens to a sequence and then drafts. Here the rows that it changes are saved before the
step and restored after it. During the step the last draft is hidden, so nothing is learned from tokens that may never
be produced.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from ssd.sequences.local_index import FRESH_ROOM
from ssd.sequences.tables import FRESH_SIZE, NODES, ROOM, SIZE, Sequences
from ssd.stats import Stats
from ssd.types import DraftBatch, Progress

Step = Callable[[np.ndarray, Progress], DraftBatch]
"""Function that commits tokens and drafts, for the rows of a batch."""


def draft_after(progress: Progress, rows: np.ndarray, sequences: Sequences, stats: Stats, step: Step) -> DraftBatch:
    """Draft after each of K continuations; several may belong to the same sequence.

    progress: the tokens of each continuation, as if they had been committed, and `min_path_prob`. rows: int64 [K]. A
    continuation has no draft where committing it would reorganize the sequence's index.
    """
    progress.check_arrays()
    bounds = progress.offsets.tolist()
    runs = [progress.tokens[start:end] for start, end in pairwise(bounds)]
    drafts = [DraftBatch.empty(1)] * len(rows)
    left = np.array([_fits(sequences, int(row), run) for row, run in zip(rows, runs, strict=True)], bool)
    while left.any():
        # One continuation of each sequence at a time, since all of a sequence use the same row.
        waiting = left.nonzero()[0]
        at = waiting[np.unique(rows[waiting], return_index=True)[1]]
        left[at] = False
        batch = _step_and_restore(rows[at], progress.take(at), sequences, stats, step)
        for place, index in enumerate(at):
            drafts[index] = batch.take([place])
    return DraftBatch.concatenate(drafts) if drafts else DraftBatch.empty(0)


def _fits(sequences: Sequences, row: int, run: np.ndarray) -> bool:
    """Return whether a run can be committed without reorganizing the index; makes room for its tokens."""
    state = sequences.state[row]
    if state[FRESH_SIZE] + len(run) > FRESH_ROOM:
        return False
    if state[SIZE] + len(run) + sequences.max_draft + 2 > state[ROOM]:
        sequences.make_room(row, len(run))
    return True


def _step_and_restore(
    rows: np.ndarray, progress: Progress, sequences: Sequences, stats: Stats, step: Step
) -> DraftBatch:
    saved = [table[rows] for table in sequences.tables]
    fresh = [sequences.local(row).fresh.copy() for row in rows.tolist()]
    steps = stats.counters.steps.copy()
    try:
        sequences.state[rows, NODES] = 0
        return step(rows, progress)
    finally:
        for table, values in zip(sequences.tables, saved, strict=True):
            table[rows] = values
        for row, values in zip(rows.tolist(), fresh, strict=True):
            sequences.local(row).fresh[:] = values
        stats.counters.steps[:] = steps
