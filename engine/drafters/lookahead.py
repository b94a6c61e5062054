"""Lookahead decoding (Fu et al., 2024): n-grams that the target itself produces in parallel, without weights.

The lookahead branch guesses the next tokens at once and improves them in every step (Jacobi iteration). Level l,
column j of the window holds the guess, made l steps after the first, of the token at distance l + j from the last
committed token:

    level 0    last token   o1   o2   o3          a path from the last token
    level 1            g0   g1   g2   g3          gj is a child of oj, g0 of the last token
    level 2            r0   r1   r2   r3          rj is a child of gj

These are the extra rows of `ExtraRows`, a tree in which each token attends to its column and to level 0 before it. The
target's most likely tokens after the last level, x0 to x3, complete the n-grams (oj, gj, rj, xj) of the pool and become
the new last level, while the other levels move up. The draft is a tree of the n-grams in the pool that begin with the
last committed token, the most recent ones first. The pool also has the n-grams of the request's text, as the authors'
implementation can have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from engine.drafters.base import Drafter, TargetOutputs
from engine.drafters.draft_pool import Candidates, drafts_of
from engine.drafters.drafts import DETERMINISTIC, Drafts, ExtraRows
from engine.drafters.options import LookaheadOptions
from engine.drafters.sources import DraftSource
from engine.scheduling.plan import StepPlan
from engine.scheduling.result import StepResult
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import KIND, SAMPLED
from engine.speculation.selection import path_prob
from ssd.acceptance import AcceptanceTable
from ssd.types import ROOT, DraftLimits, offsets_of

PROMPT_TOKENS = 8192
"""Number of last prompt tokens whose n-grams are in the pool; adding them takes milliseconds."""


class NgramPool:
    """The most recent n-grams of a sequence by their first token."""

    def __init__(self, capacity: int) -> None:
        """capacity: largest number of n-grams with the same first token."""
        self._capacity = capacity
        self._ngrams: dict[int, dict[tuple[int, ...], None]] = {}
        """The oldest first."""

    def add(self, ngrams: Iterable[tuple[int, ...]]) -> None:
        """Add n-grams, the most recent one last."""
        for ngram in ngrams:
            own = self._ngrams.setdefault(ngram[0], {})
            own.pop(ngram, None)
            own[ngram] = None
            if len(own) > self._capacity:
                del own[next(iter(own))]

    def find(self, token: int) -> list[tuple[int, ...]]:
        """Return the n-grams that begin with a token, the most recent one first."""
        return [*reversed(self._ngrams.get(token, ()))]


class Window:
    """The lookahead branch of one sequence; see the module's docstring."""

    def __init__(self, sizes: LookaheadOptions, text: np.ndarray) -> None:
        """text: uint32 [N], of which the last tokens are the first guesses; any guesses would do."""
        self._levels = np.zeros((sizes.ngram - 1, sizes.window), np.uint32)
        self._levels[0] = np.resize(text[-sizes.window :], sizes.window)
        self._levels[0, 0] = text[-1]
        self._filled = 1
        """Number of levels that have guesses."""
        self._columns = 0
        """Number of columns that the current step runs."""

    def rows(self, room: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens, uint32 [e], and parents, int32 [e], of the extra rows of a step: of the columns that fit.

        room: largest number of extra rows.
        """
        self._columns = columns = min(self._levels.shape[1], (room + 1) // self._filled)
        if not columns:
            return np.empty(0, np.uint32), np.empty(0, np.int32)
        tokens = self._levels[: self._filled, :columns].ravel()[1:]
        # Row (l, j) has the index l * columns + j - 1; the first one, -1, is the last committed token.
        parents = np.arange(-1, len(tokens) - 1) - (columns - 1) * (np.arange(1, len(tokens) + 1) >= columns)
        return tokens, parents.astype(np.int32)

    def advance(self, next_token: int, extra: np.ndarray, committed: np.ndarray) -> list[tuple[int, ...]]:
        """Update the guesses after a step, and return the n-grams that it completed.

        next_token: the target's token after the last one. extra: uint32 [e], the target's tokens after the extra rows.
        committed: uint32 [n], the tokens of the step, at least 1.
        """
        ngrams: list[tuple[int, ...]] = []
        columns, moved = self._columns, 0
        # If the drafts of this drafter were refused, the step had no extra rows.
        if columns and len(extra) == columns * self._filled - 1:
            after = np.append(np.uint32(next_token), extra)[-columns:]
            if self._filled < len(self._levels):
                self._levels[self._filled, :columns] = after
                # Columns that did not run repeat the last guess.
                self._levels[self._filled, columns:] = after[-1]
                self._filled += 1
            else:
                ngrams = list(zip(*self._levels[:, :columns].tolist(), after.tolist(), strict=True))
                self._levels[:-1] = self._levels[1:]
                self._levels[-1, :columns] = after
                moved = 1
        self._shift(len(committed) - moved)
        self._levels[0, 0] = committed[-1]
        self._columns = 0
        return ngrams

    def _shift(self, count: int) -> None:
        """Move the guesses by `count` columns; the last guess of each level is repeated in the free columns."""
        width = self._levels.shape[1]
        self._levels = self._levels[:, np.minimum(np.arange(width) + count, width - 1)]


@dataclass
class LookaheadState:
    """State of one sequence."""

    window: Window
    pool: NgramPool


@dataclass
class Trees:
    """Candidate trees of a batch, without probabilities."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """Indices within the same tree."""
    depths: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    """1 / (1 + number of more recent siblings)."""
    lengths: list[int] = field(default_factory=list)

    def add(self, ngrams: Iterable[tuple[int, ...]]) -> None:
        """Add a tree of n-grams without their first token; n-grams share the nodes of a common prefix."""
        first = len(self.tokens)
        children: dict[tuple[int, int], int] = {}
        siblings: dict[int, int] = {}
        for ngram in ngrams:
            at = ROOT
            for depth, token in enumerate(ngram[1:], 1):
                node = children.get((at, token))
                if node is None:
                    node = children[at, token] = len(self.tokens) - first
                    siblings[at] = siblings.get(at, 0) + 1
                    self.tokens.append(token)
                    self.parents.append(at)
                    self.depths.append(depth)
                    self.scores.append(1 / siblings[at])
                at = node
        self.lengths.append(len(self.tokens) - first)


class LookaheadDrafter(Drafter):
    """Drafts n-grams from a Jacobi branch that runs in the target's batch, and from the request's text."""

    def __init__(self, sizes: LookaheadOptions, *, has_trees: bool) -> None:
        """has_trees: draft trees; otherwise only the most recent n-gram."""
        self.needs = TargetOutputs(extra_rows=sizes.rows)
        self.limits = DraftLimits(sizes.ngram - 1)
        self._sizes = sizes
        self._candidates = sizes.candidates if has_trees else 1
        self._running: dict[int, LookaheadState] = {}
        self._table = AcceptanceTable()

    def start(self, sequence: Sequence) -> None:
        """See `Drafter.start`."""
        prompt = sequence.request.prompt
        running = LookaheadState(Window(self._sizes, prompt), NgramPool(self._sizes.candidates))
        running.pool.add(self._ngrams_of(prompt[-PROMPT_TOKENS:]))
        self._running[sequence.sequence_id] = running

    def propose(self, plan: StepPlan) -> Drafts:
        """See `Drafter.propose`."""
        windows = [self._running[sequence.sequence_id].window for sequence in plan.producing]
        rows = [window.rows(room) for window, room in zip(windows, plan.extra_rooms.tolist(), strict=True)]
        tokens, parents = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        extra = ExtraRows(tokens, parents, offsets_of(np.array([len(own) for own, _ in rows])))
        return replace(self._drafts(plan), extra=extra)

    def observe(self, result: StepResult) -> None:
        """Move the windows, and add the n-grams of windows and committed text to the pools."""
        result.teach(self._table)
        for index in np.flatnonzero(result.lengths).tolist():
            sequence, committed = result.plan.producing[index], result.tokens_of(index)
            running = self._running[sequence.sequence_id]
            running.pool.add(running.window.advance(int(committed[0]), result.extra_of(index), committed))
            # n-grams of the text that end with a committed token.
            running.pool.add(self._ngrams_of(sequence.tokens[-(len(committed) + self._sizes.ngram - 1) :]))

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """See `Drafter.finish`."""
        self._running.pop(sequence.sequence_id, None)

    def _drafts(self, plan: StepPlan) -> Drafts:
        """Return the likeliest nodes of the n-grams that begin with each sequence's last token."""
        trees = Trees()
        for sequence in plan.producing:
            pool = self._running[sequence.sequence_id].pool
            trees.add(pool.find(int(sequence.tokens[-1]))[: self._candidates])
        lengths, parents = np.array(trees.lengths), np.array(trees.parents, np.int64)
        owner = np.arange(plan.producers).repeat(lengths)
        is_sampled = plan.table.state[plan.rows, KIND] & SAMPLED != 0
        depths, scores = np.array(trees.depths, np.int64), np.array(trees.scores, np.float32)
        accept_prob = self._table.accept_prob(is_sampled[owner], scores, depths)
        starts = np.cumsum(lengths) - lengths
        nodes = Candidates(
            owner=owner,
            parent=np.where(parents == ROOT, ROOT, parents + starts[owner]),
            token=np.array(trees.tokens, np.int64),
            q_row=np.full(len(owner), DETERMINISTIC),
            accept_prob=accept_prob,
            path_prob=path_prob(accept_prob, parents, np.append(0, np.cumsum(lengths))),
            score=scores,
        )
        return drafts_of(nodes, plan.rooms, DraftSource.LOOKAHEAD)

    def _ngrams_of(self, text: np.ndarray) -> Iterable[tuple[int, ...]]:
        """Return all n-grams of a text, in order."""
        tokens = text.tolist()
        return zip(*(tokens[first:] for first in range(self._sizes.ngram)), strict=False)
