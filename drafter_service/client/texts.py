"""What the running sequences have committed, kept so that it can be told again."""

from __future__ import annotations

import numpy as np

TAIL = 4096
"""The newest tokens of each sequence lie in a table, so that a whole batch is put there in one go."""

FOLD_EVERY = 64
"""Steps whose tokens wait to be put there together: that takes hardly longer than for one step."""


class Texts:
    """A text for each row."""

    def __init__(self) -> None:
        self._sizes = np.zeros(0, np.int64)
        self._bodies: list[list[np.ndarray]] = []
        """All but the newest tokens."""
        self._tails = np.empty((0, TAIL), np.uint32)
        """The newest tokens,"""
        self._fills = np.zeros(0, np.int64)
        """and how many these are."""
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        """Even newer ones: rows, tokens and offsets."""

    def grow(self, rows: int) -> None:
        """Have so many rows."""
        more = rows - len(self._bodies)
        self._sizes = np.pad(self._sizes, (0, more))
        self._bodies += [[] for _ in range(more)]
        self._tails = np.pad(self._tails, ((0, more), (0, 0)))
        self._fills = np.pad(self._fills, (0, more))

    def clear(self, row: int) -> None:
        """Make a row's text empty."""
        self._fold()
        self._sizes[row] = self._fills[row] = 0
        self._bodies[row] = []

    def append(self, rows: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Append `tokens[offsets[i]:offsets[i + 1]]`, uint32, to the text of `rows[i]`. `rows` is kept."""
        self._waiting.append((rows, tokens.copy(), offsets.astype(np.int64)))

    def tidy(self) -> None:
        """Now and then, when nobody is waiting."""
        if len(self._waiting) >= FOLD_EVERY:
            self._fold()

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """How many tokens each text has, int64 [B]."""
        self._fold()
        return self._sizes[rows]

    def text(self, row: int) -> np.ndarray:
        """A copy of a text, uint32."""
        self._fold()
        return np.concatenate((*self._bodies[row], self._tails[row, : self._fills[row]]))

    def last(self, rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """The last `offsets[i + 1] - offsets[i]` tokens of each text, one behind the other, uint32; all int64."""
        self._fold()
        counts = offsets[1:] - offsets[:-1]
        fills = self._fills[rows]
        if np.count_nonzero(counts > fills):
            runs = zip(rows.tolist(), (self._sizes[rows] - counts).tolist(), strict=True)
            return np.concatenate([self.text(row)[begin:] for row, begin in runs])
        return self._tails.reshape(-1)[spread(rows * TAIL + (fills - counts), offsets)]

    def _fold(self) -> None:
        """Put what is waiting into the table."""
        if not self._waiting:
            return
        rows = np.concatenate([rows for rows, _, _ in self._waiting])
        tokens = np.concatenate([tokens for _, tokens, _ in self._waiting])
        counts = np.concatenate([offsets[1:] - offsets[:-1] for _, _, offsets in self._waiting])
        self._waiting.clear()
        order = rows.argsort(kind="stable")
        before = counts[order].cumsum() - counts[order]
        added, first = np.unique(rows[order], return_index=True)
        if not len(added):
            return
        more = np.add.reduceat(counts[order], first)
        self._sizes[added] += more
        self._spill(added[self._fills[added] + more > TAIL])
        begins = np.empty_like(before)
        begins[order] = before - before[first].repeat(np.diff(first, append=len(rows)))
        offsets = np.concatenate(([0], counts.cumsum()))
        if more.max() > TAIL:
            self._fold_long(rows, tokens, offsets)
            return
        self._tails.reshape(-1)[spread(rows * TAIL + self._fills[rows] + begins, offsets)] = tokens
        self._fills[added] += more

    def _fold_long(self, rows: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """As much as the table has no room for."""
        self._spill(np.unique(rows))
        for row, begin, end in zip(rows.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            self._bodies[row].append(tokens[begin:end])

    def _spill(self, rows: np.ndarray) -> None:
        for row in rows.tolist():
            self._bodies[row].append(self._tails[row, : self._fills[row]].copy())
            self._fills[row] = 0


def spread(begins: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Counts up from `begins[i]` for run i, one run behind the other; all int64."""
    places: np.ndarray = (begins - offsets[:-1]).repeat(offsets[1:] - offsets[:-1])
    places += np.arange(len(places))
    return places
