"""The committed tokens of running sequences, kept to register them again."""

from __future__ import annotations

import numpy as np

TAIL = 4096
"""Width of the table with the newest tokens of each sequence, to which a whole batch is appended at once."""

FOLD_EVERY = 64
"""Number of batches that are written to the table together; writing 64 takes little longer than one."""


class TokenHistory:
    """The committed tokens of each row."""

    def __init__(self) -> None:
        self._sizes = np.zeros(0, np.int64)
        self._older: list[list[np.ndarray]] = []
        """Tokens of each row that precede those in the table."""
        self._tails = np.empty((0, TAIL), np.uint32)
        """The newest tokens of each row."""
        self._tail_sizes = np.zeros(0, np.int64)
        self._unfolded: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        """Batches not written to the table yet: rows, tokens and offsets."""

    def grow(self, rows: int) -> None:
        """Increase the number of rows to `rows`."""
        more = rows - len(self._older)
        self._sizes = np.pad(self._sizes, (0, more))
        self._older += [[] for _ in range(more)]
        self._tails = np.pad(self._tails, ((0, more), (0, 0)))
        self._tail_sizes = np.pad(self._tail_sizes, (0, more))

    def clear(self, row: int) -> None:
        """Remove all tokens of a row."""
        self._fold()
        self._sizes[row] = self._tail_sizes[row] = 0
        self._older[row] = []

    def append(self, rows: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Append `tokens[offsets[i]:offsets[i + 1]]`, uint32, to `rows[i]`. Keeps `rows`, copies the other arrays."""
        self._unfolded.append((rows, tokens.copy(), offsets.copy()))

    def fold_if_due(self) -> None:
        """Write collected batches to the table if there are many. Call it outside of waits for drafts."""
        if len(self._unfolded) >= FOLD_EVERY:
            self._fold()

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each row, int64 [B]."""
        self._fold()
        return self._sizes[rows]

    def tokens(self, row: int) -> np.ndarray:
        """Return a copy of all tokens of a row, uint32."""
        self._fold()
        return np.concatenate((*self._older[row], self._tails[row, : self._tail_sizes[row]]))

    def last(self, rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the last `offsets[i + 1] - offsets[i]` tokens of each row, concatenated, uint32. Arguments: int64."""
        self._fold()
        counts = offsets[1:] - offsets[:-1]
        tail_sizes = self._tail_sizes[rows]
        if np.count_nonzero(counts > tail_sizes):
            runs = zip(rows.tolist(), (self._sizes[rows] - counts).tolist(), strict=True)
            return np.concatenate([self.tokens(row)[begin:] for row, begin in runs])
        return self._tails.reshape(-1)[indices_of_runs(rows * TAIL + (tail_sizes - counts), offsets)]

    def _fold(self) -> None:
        """Write all collected batches to the table."""
        if not self._unfolded:
            return
        rows = np.concatenate([rows for rows, _, _ in self._unfolded])
        tokens = np.concatenate([tokens for _, tokens, _ in self._unfolded])
        counts = np.concatenate([offsets[1:] - offsets[:-1] for _, _, offsets in self._unfolded], dtype=np.int64)
        self._unfolded.clear()
        order = rows.argsort(kind="stable")
        before = counts[order].cumsum() - counts[order]
        added, first = np.unique(rows[order], return_index=True)
        if not len(added):
            return
        more = np.add.reduceat(counts[order], first)
        self._sizes[added] += more
        self._move_tails_out(added[self._tail_sizes[added] + more > TAIL])
        begins = np.empty_like(before)
        begins[order] = before - before[first].repeat(np.diff(first, append=len(rows)))
        offsets = np.concatenate(([0], counts.cumsum()))
        if more.max() > TAIL:
            self._fold_long(rows, tokens, offsets)
            return
        self._tails.reshape(-1)[indices_of_runs(rows * TAIL + self._tail_sizes[rows] + begins, offsets)] = tokens
        self._tail_sizes[added] += more

    def _fold_long(self, rows: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Store runs that are longer than a row of the table."""
        self._move_tails_out(np.unique(rows))
        for row, begin, end in zip(rows.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            self._older[row].append(tokens[begin:end])

    def _move_tails_out(self, rows: np.ndarray) -> None:
        for row in rows.tolist():
            self._older[row].append(self._tails[row, : self._tail_sizes[row]].copy())
            self._tail_sizes[row] = 0


def indices_of_runs(begins: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Concatenate the ranges `begins[i]`, `begins[i] + 1`, ... of length `offsets[i + 1] - offsets[i]`; all int64."""
    indices: np.ndarray = (begins - offsets[:-1]).repeat(offsets[1:] - offsets[:-1])
    indices += np.arange(len(indices))
    return indices
