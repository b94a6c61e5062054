"""What the running sequences have committed, kept so that it can be told again."""

from __future__ import annotations

import numpy as np

TAIL = 512
"""The newest tokens of each sequence lie in a table, so that a whole batch is appended in one go."""


class Texts:
    """A text for each row."""

    def __init__(self) -> None:
        self._bodies: list[list[np.ndarray]] = []
        """All but the newest tokens."""
        self._tails = np.empty((0, TAIL), np.uint32)
        """The newest tokens,"""
        self._fills = np.zeros(0, np.int64)
        """and how many these are."""

    def grow(self, rows: int) -> None:
        """Have so many rows."""
        more = rows - len(self._bodies)
        self._bodies += [[] for _ in range(more)]
        self._tails = np.concatenate((self._tails, np.empty((more, TAIL), np.uint32)))
        self._fills = np.concatenate((self._fills, np.zeros(more, np.int64)))

    def clear(self, row: int) -> None:
        """Make a row's text empty."""
        self._bodies[row] = []
        self._fills[row] = 0

    def append(self, rows: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Append `tokens[offsets[i]:offsets[i + 1]]` to the text of `rows[i]`; all int64 but the tokens, uint32."""
        fills = self._fills[rows]
        ends = fills + (offsets[1:] - offsets[:-1])
        if np.count_nonzero(ends > TAIL):
            self._spill(rows[ends > TAIL].tolist())
            fills = self._fills[rows]
            ends = fills + (offsets[1:] - offsets[:-1])
        if np.count_nonzero(ends > TAIL):
            self._append_long(rows.tolist(), tokens, offsets)
            return
        self._tails.reshape(-1)[spread(rows * TAIL + fills, offsets)] = tokens
        self._fills[rows] = ends

    def last(self, rows: np.ndarray, counts: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """The last `counts[i]` tokens of each text, one behind the other, uint32; offsets: their bounds, int64."""
        fills = self._fills[rows]
        if np.count_nonzero(counts > fills):
            runs = zip(rows.tolist(), counts.tolist(), strict=True)
            return np.concatenate([self.text(row)[-count:] if count else self._tails[row, :0] for row, count in runs])
        return self._tails.reshape(-1)[spread(rows * TAIL + (fills - counts), offsets)]

    def text(self, row: int) -> np.ndarray:
        """A copy of a text, uint32."""
        return np.concatenate((*self._bodies[row], self._tails[row, : self._fills[row]]))

    def _spill(self, rows: list[int]) -> None:
        for row in rows:
            self._bodies[row].append(self._tails[row, : self._fills[row]].copy())
            self._fills[row] = 0

    def _append_long(self, rows: list[int], tokens: np.ndarray, offsets: np.ndarray) -> None:
        """As `append`, for tokens that the table has no room for."""
        self._spill(rows)
        for index, row in enumerate(rows):
            self._bodies[row].append(tokens[offsets[index] : offsets[index + 1]].copy())


def spread(begins: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Counts up from `begins[i]` for run i, one run behind the other; all int64."""
    places: np.ndarray = (begins - offsets[:-1]).repeat(offsets[1:] - offsets[:-1])
    places += np.arange(len(places))
    return places
