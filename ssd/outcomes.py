"""Draft after possible outcomes of verification without changing any state that later drafts depend on.

A step of the kernel commits tokens to a sequence and then drafts. Here the rows that it changes are saved before the
step and restored after it. During the step the last draft is hidden, so nothing is learned from tokens that may never
be produced.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from ssd.sequences.local_index import FRESH_ROOM
from ssd.sequences.tables import FRESH_SIZE, NODES, PARENT, ROOM, SIZE, TOKEN, Sequences
from ssd.stats import Stats
from ssd.types import DraftBatch, Outcomes, Progress, offsets_of

Step = Callable[[np.ndarray, Progress], DraftBatch]
"""Function that commits tokens and drafts, for the rows of a batch."""


def propose_after(outcomes: Outcomes, rows: np.ndarray, sequences: Sequences, stats: Stats, step: Step) -> DraftBatch:
    """Draft after each of K outcomes; rows: int64 [B] of the outcomes' sequences.

    An outcome has no draft where committing it would reorganize the sequence's index, about once in 256 tokens. Raises
    ValueError for more accepted tokens than the last draft had, or for tokens that are not a path.
    """
    bounds = outcomes.offsets.astype(np.int64)
    owners = np.repeat(np.arange(len(rows)), bounds[1:] - bounds[:-1])
    progress = Progress(
        sequence_ids=outcomes.sequence_ids[owners],
        **_concatenated(_committed_tokens(outcomes, rows, sequences)),
        verified=np.zeros(len(owners), np.uint32),
        max_draft=outcomes.max_draft[owners],
        cost=outcomes.cost,
    )
    return draft_after(progress, rows[owners], sequences, stats, step)


def draft_after(progress: Progress, rows: np.ndarray, sequences: Sequences, stats: Stats, step: Step) -> DraftBatch:
    """Draft after each of K continuations; several may belong to the same sequence.

    progress: the tokens of each continuation, as if they had been committed. rows: int64 [K]. A continuation has no
    draft where committing it would reorganize the sequence's index.
    """
    bounds = progress.offsets.tolist()
    runs = [progress.tokens[start:end] for start, end in pairwise(bounds)]
    drafts = [DraftBatch.empty(1)] * len(rows)
    left = np.array([_fits(sequences, int(row), run) for row, run in zip(rows, runs, strict=True)], bool)
    while left.any():
        # One continuation of each sequence at a time, since all of a sequence use the same row.
        waiting = left.nonzero()[0]
        at = waiting[np.unique(rows[waiting], return_index=True)[1]]
        left[at] = False
        part = Progress(
            sequence_ids=progress.sequence_ids[at],
            **_concatenated([runs[index] for index in at]),
            verified=progress.verified[at],
            max_draft=progress.max_draft[at],
            cost=progress.cost,
        )
        batch = _step_and_restore(rows[at], part, sequences, stats, step)
        for place, index in enumerate(at):
            drafts[index] = _only(batch, place)
    return DraftBatch.concatenate(drafts) if drafts else DraftBatch.empty(0)


def _concatenated(runs: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the fields `tokens` and `offsets` of `Progress` for runs of tokens."""
    offsets = offsets_of(np.array([len(run) for run in runs], np.uint32))
    return {"tokens": np.concatenate([*runs, np.empty(0, np.uint32)]), "offsets": offsets}


def _committed_tokens(outcomes: Outcomes, rows: np.ndarray, sequences: Sequences) -> list[np.ndarray]:
    """Return the tokens that each outcome would commit, uint32: the accepted part of the last draft, and the bonus."""
    state, nodes = sequences.tables[:2]
    bounds = outcomes.offsets.tolist()
    committed = []
    for index, row in enumerate(rows.tolist()):
        offered = max(0, int(state[row, NODES]) - 1)
        for outcome in range(bounds[index], bounds[index + 1]):
            accepted = int(outcomes.accepted[outcome])
            path = nodes[row, 1 : 1 + accepted]
            if accepted > offered or np.any(path[:, PARENT] != np.arange(accepted)):
                raise ValueError(
                    f"sequence {outcomes.sequence_ids[index]} was offered {offered} tokens; the first {accepted} of "
                    "them are not a path"
                )
            committed.append(np.append(path[:, TOKEN].astype(np.uint32), outcomes.bonus[outcome]))
    return committed


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


def _only(batch: DraftBatch, index: int) -> DraftBatch:
    """Return one draft of a batch."""
    first, end = batch.offsets[index : index + 2].tolist()
    return DraftBatch(
        batch.tokens[first:end],
        batch.parents[first:end],
        batch.accept_prob[first:end],
        batch.source[first:end],
        np.array([0, end - first], np.uint32),
    )
