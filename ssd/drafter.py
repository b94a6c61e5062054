"""The drafter with calibrated probabilities: drafts from finished requests, running ones and the request itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ssd.base import CorpusDrafter
from ssd.budget.curve import StepCurve
from ssd.budget.token_budget import TokenBudget
from ssd.config import DrafterConfig
from ssd.corpus.corpus import Corpus
from ssd.kernels.match import TIER_COLUMNS
from ssd.kernels.step import DONE, NEEDS_ROOM, REFUSED, Model, StepFrame, step
from ssd.sequences.local_index import FRESH_ROOM
from ssd.sequences.running import NO_ROWS
from ssd.sequences.tables import FRESH_SIZE, NODES, ROOM, SIZE
from ssd.stats import Stats
from ssd.types import ONE_EACH, DraftBatch, Progress, check_path_prob

NO_LIBRARIES = np.empty((0, TIER_COLUMNS), np.int64)

UINT32, INT32, FLOAT32, UINT8 = (np.dtype(kind) for kind in (np.uint32, np.int32, np.float32, np.uint8))
"""`numpy.empty` takes a third less time if it is given these."""

Batch = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Drafted = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class SuffixDrafter(CorpusDrafter):
    """Drafts from all finished requests, from running requests, and from each request's own text.

    One thread at a time may use it. Several drafters can share a corpus, each with its own running sequences.
    """

    PUBLISHES = True

    def __init__(
        self,
        config: DrafterConfig | None = None,
        *,
        corpus: Corpus | None = None,
        stats: Stats | None = None,
        remember: Callable[[np.ndarray, str | None, int], object] | None = None,
        curve: StepCurve | None = None,
        sorts_in_thread: bool = False,
    ) -> None:
        """See `CorpusDrafter`.

        curve: durations of the engine's steps, which decide how much is drafted; None: those of `config.cost`, or if
        that is None, a guess until `Progress.step_times` has durations.
        """
        super().__init__(config, corpus=corpus, stats=stats, remember=remember, sorts_in_thread=sorts_in_thread)
        cost = self.config.cost
        self.budget = TokenBudget(curve or (StepCurve.unknown() if cost is None else StepCurve.constant(cost)))
        self._make_frame()

    def draft_after(self, progress: Progress) -> DraftBatch:
        """Draft after K continuations of running sequences, as if they had been committed.

        progress: the tokens of each continuation; several may belong to the same sequence, and `verified` must be 0.
        A continuation has no draft where committing it would reorganize the sequence's index. Changes nothing that
        later drafts depend on. Raises ValueError as `draft`.
        """
        rows = np.concatenate([NO_ROWS, *(self.running.rows_of([each]) for each in progress.sequence_ids.tolist())])
        self._prepare(len(self.running), progress)
        least = progress.min_path_prob or self.budget.price(self.config.max_draft).min_path_prob
        progress = replace(progress, min_path_prob=least, step_times=())
        progress.check_arrays()
        drafts = [DraftBatch.empty(1)] * len(rows)
        counts = np.diff(progress.offsets.astype(np.int64)).tolist()
        left = np.array([self._fits(*pair) for pair in zip(rows.tolist(), counts, strict=True)], bool)
        while left.any():
            # One continuation of each sequence at a time, since all of a sequence use the same row.
            waiting = left.nonzero()[0]
            at = waiting[np.unique(rows[waiting], return_index=True)[1]]
            left[at] = False
            batch = self._step_and_restore(rows[at], progress.take(at))
            for place, index in enumerate(at):
                drafts[index] = batch.take([place])
        return DraftBatch.concatenate(drafts) if drafts else DraftBatch.empty(0)

    def use_corpus(self, corpus: Corpus) -> None:
        """See `CorpusDrafter.use_corpus`."""
        super().use_corpus(corpus)
        self._make_frame()

    @property
    def own_bytes(self) -> int:
        """Memory of the running sequences, idle sessions and scratch arrays."""
        return super().own_bytes + self._frame.nbytes

    def _fits(self, row: int, tokens: int) -> bool:
        """Return whether some tokens can be committed without reorganizing the index; makes room for them."""
        state = self._sequences.state[row]
        if state[FRESH_SIZE] + tokens > FRESH_ROOM:
            return False
        if state[SIZE] + tokens + self.config.max_draft + 2 > state[ROOM]:
            self._sequences.make_room(row, tokens)
        return True

    def _step_and_restore(self, rows: np.ndarray, progress: Progress) -> DraftBatch:
        """Do a step, and restore what it changed.

        During the step the last drafts are hidden, so nothing is learned from tokens that may never be produced.
        """
        sequences, steps = self._sequences, self.stats.counters.steps.copy()
        saved = [table[rows] for table in sequences.tables]
        fresh = [sequences.local(row).fresh.copy() for row in rows.tolist()]
        try:
            sequences.state[rows, NODES] = 0
            return self._step(rows, progress)
        finally:
            for table, values in zip(sequences.tables, saved, strict=True):
                table[rows] = values
            for row, values in zip(rows.tolist(), fresh, strict=True):
                sequences.local(row).fresh[:] = values
            self.stats.counters.steps[:] = steps

    def _make_frame(self) -> None:
        model = Model(self.corpus.learned, self.corpus.fallback.arrays)
        depth, is_tree = self.config.match_depth, self.config.draft_shape == "tree"
        self._frame = StepFrame(self._sequences, model, self.budget, self.stats, match_depth=depth, is_tree=is_tree)
        self._state = self._sequences.state

    def _prepare(self, sequences: int, progress: Progress) -> float:
        """Return the minimum path probability of draft tokens, 0 if the token budget decides, which is prepared."""
        if progress.min_path_prob is not None:
            check_path_prob(progress.min_path_prob)
            return progress.min_path_prob
        self.budget.prepare(sequences + progress.other_sequences, progress.other_tokens, progress.cost)
        return 0.0

    def _step(self, rows: np.ndarray, progress: Progress) -> DraftBatch:
        config = self.config
        if self._sequences.state is not self._state:
            self._make_frame()
        least = self._prepare(len(rows), progress)
        room = len(rows) * config.max_draft
        drafts = (
            np.empty(room, UINT32),
            np.empty(room, INT32),
            np.empty(room, FLOAT32),
            np.empty(room, UINT8),
            np.empty(len(rows) + 1, UINT32),
        )
        if progress.steps is not None:
            progress.check_arrays()
        steps = ONE_EACH if progress.steps is None else progress.steps
        given = (rows, progress.tokens, progress.offsets, progress.verified, progress.max_draft, steps)
        while True:
            result, number = self._run(given, drafts, least)
            if result == DONE:
                tokens, parents, accept_prob, source, offsets = drafts
                batch = DraftBatch(tokens[:number], parents[:number], accept_prob[:number], source[:number], offsets)
                if progress.step_times:
                    batch.pause_steps = self.budget.learn(progress)
                return batch
            if result == REFUSED:
                progress.check(self.running.offered())
            assert result == NEEDS_ROOM
            self._sequences.make_room(int(rows[number]), len(progress.tokens))

    def _run(self, batch: Batch, drafts: Drafted, least: float) -> tuple[int, int]:
        """Call the kernel. Views are local to this call, so that the frames of a kept exception do not hold them."""
        view, libraries = self.corpus.view, self.corpus.library_views
        tiers = np.concatenate([each.arrays.tiers for each in libraries]) if libraries else NO_LIBRARIES
        try:
            live = self.corpus.live.addresses
            return step(self._frame.addresses, view.addresses, live, tiers, *batch, *drafts, least)
        except TypeError:
            # The kernel has no version for arrays of types other than those of `Progress`.
            return REFUSED, 0
