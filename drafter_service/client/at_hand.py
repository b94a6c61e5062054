"""Drafts of which a part is left for the steps after this one.

A part that is left serves a step only if it is a whole draft, as long as the engine can use: a shorter one would cost
more tokens than the round trip that it saves. It is void once the target produces something else, and once a token
costs more than when it was drafted, since it may no longer pay.
"""

from __future__ import annotations

import numpy as np

from drafter_service.client.texts import spread
from ssd.types import DraftBatch, offsets_of

AS_CONFIGURED = -1.0
"""In place of a cost that the engine does not say."""


class AtHand:
    """At most one draft for each row of the running sequences."""

    def __init__(self) -> None:
        self.count = 0
        """How many rows have one."""
        self.begins = np.zeros(0, np.int64)
        """How many tokens of it the target has produced already; 0 without one."""
        self._sizes = np.zeros(0, np.int64)
        """How many tokens it has; 0 without one."""
        self._is_lasting = np.zeros(0, bool)
        """Whether what is left of it may serve later steps."""
        self._costs = np.zeros(0, np.float64)
        """What a token cost when it was drafted."""
        self._width = 0
        self._tables = tuple(np.zeros((0, 0), dtype) for dtype in (np.uint32, np.int32, np.float32, np.uint8))
        """Tokens, parents, odds and sources by row."""

    def grow(self, rows: int) -> None:
        """Have so many rows."""
        more = rows - len(self._sizes)
        self.begins = np.pad(self.begins, (0, more))
        self._sizes = np.pad(self._sizes, (0, more))
        self._is_lasting = np.pad(self._is_lasting, (0, more))
        self._costs = np.pad(self._costs, (0, more))
        self._tables = tuple(np.pad(table, ((0, more), (0, 0))) for table in self._tables)

    def drop(self, rows: np.ndarray) -> None:
        """There are no drafts for these rows."""
        if self.count:
            self._set(rows, 0, 0)

    def take(self, rows: np.ndarray, drafts: DraftBatch, is_lasting: np.ndarray | bool, cost: float | None) -> None:
        """Keep drafts for `rows`, int64 [B]; is_lasting, bool [B]: which of them may serve later steps too."""
        offsets = drafts.offsets.astype(np.int64)
        sizes = offsets[1:] - offsets[:-1]
        longest = int(sizes.max())
        if longest > self._width:
            self._tables = tuple(np.pad(table, ((0, 0), (0, longest - self._width))) for table in self._tables)
            self._width = longest
        places = spread(rows * self._width, offsets)
        arrays = (drafts.tokens, drafts.parents, drafts.accept_prob, drafts.source)
        for table, values in zip(self._tables, arrays, strict=True):
            table.reshape(-1)[places] = values
        self._is_lasting[rows] = is_lasting
        self._costs[rows] = AS_CONFIGURED if cost is None else cost
        self._set(rows, sizes, 0)

    def advance(self, rows: np.ndarray, tokens: np.ndarray, offsets: np.ndarray, cost: float | None) -> None:
        """Go on behind what was committed, or drop what does not begin with it; arguments as in `Texts.append`."""
        if not self.count:
            return
        sizes, begins = self._sizes[rows], self.begins[rows]
        counts = offsets[1:] - offsets[:-1]
        keep = self._is_lasting[rows] & (counts <= sizes - begins)
        if np.count_nonzero(keep):
            now, then = AS_CONFIGURED if cost is None else cost, self._costs[rows]
            keep &= (then == now) | ((now > 0) & (then > now))
            places = spread(rows * self._width + begins, offsets)
            is_other = self._tables[0].reshape(-1).take(places, mode="clip") != tokens
            others = np.concatenate(([0], is_other.cumsum()))
            keep &= others[offsets[1:]] == others[offsets[:-1]]
        self._set(rows, sizes * keep, (begins + counts) * keep)

    def is_whole(self, rows: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """Whether something is left, as long as the engine can use, bool [B]; limits: uint32 [B]."""
        whole: np.ndarray = self._sizes[rows] - self.begins[rows] >= np.maximum(limits, 1)
        return whole

    def hand_out(self, rows: np.ndarray, limits: np.ndarray) -> DraftBatch:
        """What is left of each draft, up to `limits`, uint32 [B]."""
        if not self.count:
            return DraftBatch.empty(len(rows))
        begins = self.begins[rows]
        offsets = offsets_of(np.minimum(self._sizes[rows] - begins, limits.astype(np.int64)))
        runs = offsets.astype(np.int64)
        places = spread(rows * self._width + begins, runs)
        tokens, parents, odds, source = (table.reshape(-1)[places] for table in self._tables)
        parents -= np.repeat(begins, runs[1:] - runs[:-1]).astype(np.int32)
        return DraftBatch(tokens, parents, odds, source, offsets)

    def _set(self, rows: np.ndarray, sizes: np.ndarray | int, begins: np.ndarray | int) -> None:
        self._sizes[rows] = sizes
        self.begins[rows] = begins
        self.count = int(np.count_nonzero(self._sizes))
